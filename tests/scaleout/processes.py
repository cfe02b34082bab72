"""Workers and a gateway as processes, without Ray."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import httpx

from tests.engine_thread import run_engines_in_threads
from tests.forking import ForkedProcess
from tests.waiting import wait_until
from vlmserve.scaleout import absence, proxy
from vlmserve.scaleout.launch import MemberProcess
from vlmserve.scaleout.member import main
from vlmserve.scaleout.member_messages import GatewayLaunch, Launch, WorkerLaunch
from vlmserve.scaleout.settings import GatewayConfig
from vlmserve.settings.config import EngineConfig, MediaConfig, ServerConfig

TOKEN = "a token of the test"


def run_member(patience: float, in_threads: bool) -> None:
    """What the module of members does as a program. in_threads: whether workers run their engines in threads."""
    if patience > absence.PATIENCE:
        proxy.NEWS = patience
    absence.PATIENCE = patience
    if in_threads:
        run_engines_in_threads()
    os.setpgrp()
    os._exit(main())


class ForkedMember(MemberProcess):
    """One that has imported everything already."""

    def __init__(self, launch: Launch, patience: float, in_threads: bool) -> None:
        process: Any = ForkedProcess(run_member, patience, in_threads, text=False)
        super().__init__(launch, process)


class Cluster:
    """A gateway and workers with mock engines. Use as a context manager."""

    def __init__(
        self,
        folder: Path | str,
        workers: int = 2,
        *,
        engine: Any = None,
        server: Any = None,
        gateway: Any = None,
        front: Any = None,
        own: Any = None,
        media: Any = None,
        patience: float = absence.PATIENCE,
        in_threads: bool = True,
    ) -> None:
        """own: settings of the server, by the name of the worker that has them. patience: seconds for which requests
        wait for a worker, and for news of a worker that may be leaving if this is more than the default. in_threads:
        whether workers run their engines in threads instead of processes."""
        self._patience = patience
        self._in_threads = in_threads
        self._engine = EngineConfig(**{"model": str(folder), "engine": "mock", **(engine or {})})
        self._server = ServerConfig(
            **{"port": 0, "served_model_name": "tiny", "storage_url": "none", "stats_interval": 0, **(server or {})}
        )
        self._front = ServerConfig(port=0, **(front or {}))
        self._media = MediaConfig(**(media or {}))
        self._gateway = GatewayConfig(**(gateway or {}))
        self._count = workers
        self._own = own or {}
        self._stack = contextlib.ExitStack()
        self.workers: dict[str, tuple[MemberProcess, str]] = {}

    def __enter__(self) -> Cluster:
        with contextlib.ExitStack() as stack:
            launch = GatewayLaunch(TOKEN, self._front.model_dump_json(), self._gateway.model_dump_json())
            self.gateway = self.start(launch, stack)
            started = [(f"worker-{n}", self.start_worker(f"worker-{n}", stack)) for n in range(self._count)]
            self.url = self.gateway.wait_until_up()
            for name, process in started:
                self.workers[name] = process, process.wait_until_up()
            self.tell()
            self.wait_for(self._count)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, launch: Any, stack: contextlib.ExitStack | None = None) -> MemberProcess:
        process = ForkedMember(launch, self._patience, self._in_threads)
        (stack or self._stack).callback(process.close)
        return process

    def start_worker(self, name: str, stack: contextlib.ExitStack | None = None) -> MemberProcess:
        server = self._server.model_copy(update=self._own.get(name, {}))
        launch = WorkerLaunch(
            name, TOKEN, self._engine.model_dump_json(), self._media.model_dump_json(), server.model_dump_json()
        )
        return self.start(launch, stack)

    def add(self, name: str) -> None:
        """Another worker, once it answers."""
        process = self.start_worker(name)
        self.workers[name] = process, process.wait_until_up()
        self.tell()

    def tell(self, count: int | None = None) -> None:
        """Tell the gateway who is there, or of the first `count` workers only."""
        self.gateway.set_workers([url for _, url in self.workers.values()][:count])

    def wait_for(self, count: int) -> None:
        """Until the gateway hears so many workers."""
        wait_until(lambda: len(self.up()) == count)

    def up(self) -> list[str]:
        """The names of the workers that get requests."""
        return [name for name, value in self._by_worker("worker_up").items() if value]

    def requests(self, worker: str) -> float:
        """How many requests a worker was sent."""
        return self._by_worker("requests_total").get(worker, 0.0)

    def _by_worker(self, metric: str) -> dict[str, float]:
        """One of the gateway's metrics by the names of workers."""
        prefix = f'vlmserve:gateway_{metric}{{worker="'
        page = httpx.get(f"{self.url}/metrics", timeout=20).text.splitlines()
        found = [line.removeprefix(prefix).split('"} ') for line in page if line.startswith(prefix)]
        return {name: float(value) for name, value in found}
