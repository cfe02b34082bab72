"""CPU time and memory of client and server, and the client's lag."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from types import TracebackType

import msgspec
import psutil

from vlmserve.loadtest.client import Client, RequestFailedError, clock

INTERVAL = 1.0
"""Seconds between samples of CPU time and memory."""
_TICK = 0.05
"""Seconds between measurements of the client's lag."""
_METRIC = re.compile(
    rb"^(?:\w+:)?process_(cpu_seconds_total|resident_memory_bytes)(?:\{([^}]*)\})? ([0-9.eE+-]+)", re.MULTILINE
)
"""Samples of Prometheus's standard process metrics, with or without a prefix."""
_LABEL = re.compile(rb'process="(\w+)"')


class ProcessUsage(msgspec.Struct):
    """cores: mean CPU seconds per second. memory: peak bytes. None: unknown."""

    name: str
    cores: float | None = None
    peak_cores: float | None = None
    memory: int | None = None


class Usage(msgspec.Struct):
    """Usage of all processes. lags: delays of the client's timer, in seconds."""

    client: ProcessUsage = msgspec.field(default_factory=lambda: ProcessUsage("client"))
    server: list[ProcessUsage] = []
    lags: list[float] = []


class _Samples:
    def __init__(self) -> None:
        self.seconds: list[tuple[float, float]] = []
        self.memory: list[float] = []

    def usage(self, name: str) -> ProcessUsage:
        """Usage over all samples. Skips a counter that fell: its process restarted."""
        rates = [
            (after - before) / (later - earlier)
            for (earlier, before), (later, after) in zip(self.seconds, self.seconds[1:], strict=False)
            if later - earlier >= INTERVAL / 2 and after >= before
        ]
        cores = None
        if len(self.seconds) > 1 and self.seconds[-1][1] >= self.seconds[0][1]:
            (began, first), (ended, last) = self.seconds[0], self.seconds[-1]
            cores = (last - first) / max(ended - began, 1e-9)
        memory = int(max(self.memory)) if self.memory else None
        return ProcessUsage(name, cores, max([*rates, *([] if cores is None else [cores])], default=None), memory)


class Monitor:
    """Samples during a test. metrics: also query the server's /metrics."""

    def __init__(self, client: Client, *, metrics: bool) -> None:
        self._client = client
        self._asks = metrics
        self._own = psutil.Process(os.getpid())
        self._samples: dict[str, _Samples] = {"client": _Samples()}
        self._lags: list[float] = []
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def usage(self) -> Usage:
        processes = [samples.usage(name) for name, samples in self._samples.items()]
        return Usage(processes[0], processes[1:], self._lags)

    async def __aenter__(self) -> Monitor:
        await self._sample()
        self._tasks = [asyncio.ensure_future(self._watch()), asyncio.ensure_future(self._tick())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._sample()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL)
            await self._sample()

    async def _tick(self) -> None:
        while True:
            due = clock() + _TICK
            await asyncio.sleep(_TICK)
            self._lags.append(max(0.0, clock() - due))

    async def _sample(self) -> None:
        now, times = clock(), self._own.cpu_times()
        own = self._samples["client"]
        own.seconds.append((now, times.user + times.system))
        own.memory.append(self._own.memory_info().rss)
        if not self._asks:
            return
        with contextlib.suppress(RequestFailedError):
            status, page = await self._client.fetch("GET", "/metrics")
            if status == 200:
                self._read(page, clock())

    def _read(self, page: bytes, now: float) -> None:
        for kind, labels, value in _METRIC.findall(page):
            label = _LABEL.search(labels)
            samples = self._samples.setdefault(label[1].decode() if label else "server", _Samples())
            if kind == b"resident_memory_bytes":
                samples.memory.append(float(value))
            else:
                samples.seconds.append((now, float(value)))
