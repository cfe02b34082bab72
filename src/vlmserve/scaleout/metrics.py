"""Metrics of a gateway and of its workers, labeled with their names."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from vlmserve.scaleout.fleet import Fleet
from vlmserve.scaleout.messages import Feedback
from vlmserve.scaleout.upstream import Upstream, UpstreamError

_PREFIX = "vlmserve:gateway_"
_TIMEOUT = 2.0
"""Timeout in seconds for a worker's metrics; without them the page shows the others."""
_SECONDS = (25e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 5e-3, 2.5e-2)
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


class GatewayMetrics:
    """fleets, num_in_flight: called at every scrape."""

    def __init__(self, fleets: Callable[[], Iterable[Fleet]], num_in_flight: Callable[[], int]) -> None:
        registry = self._registry = CollectorRegistry()
        self._errors = Counter(
            _PREFIX + "request_errors", "Requests answered with an error, by its code.", ["code"], registry=registry
        )
        self.requests = Counter(_PREFIX + "requests", "Requests sent to a worker.", ["worker"], registry=registry)
        self.retries = Counter(_PREFIX + "retries", "Requests sent to another worker.", registry=registry)
        self.broken = Counter(
            _PREFIX + "broken_answers", "Answers that were cut off because their worker died.", registry=registry
        )
        self.routing = Histogram(
            _PREFIX + "routing_seconds", "Seconds to make a request's key and choose a worker.", buckets=_SECONDS,
            registry=registry,
        )  # fmt: skip
        self._prompt_tokens = Counter(_PREFIX + "prompt_tokens", "Tokens of prompts.", registry=registry)
        self._cached_tokens = Counter(
            _PREFIX + "cached_tokens", "Tokens of prompts that a worker had cached.", registry=registry
        )
        registry.register(_Workers(fleets, num_in_flight))

    def count_error(self, code: str) -> None:
        self._errors.labels(code).inc()

    def count_tokens(self, feedback: Feedback) -> None:
        self._prompt_tokens.inc(feedback.prompt_tokens)
        self._cached_tokens.inc(feedback.cached_tokens)

    def text(self) -> str:
        return generate_latest(self._registry).decode()


class _Workers(Collector):
    def __init__(self, fleets: Callable[[], Iterable[Fleet]], num_in_flight: Callable[[], int]) -> None:
        self._fleets = fleets
        self._num_in_flight = num_in_flight

    def collect(self) -> Iterator[Metric]:
        running = GaugeMetricFamily(_PREFIX + "worker_running", "Running requests of a worker.", labels=["worker"])
        usable = GaugeMetricFamily(_PREFIX + "worker_up", "1 if the worker gets requests.", labels=["worker"])
        flight = GaugeMetricFamily(_PREFIX + "in_flight", "Requests in flight.", value=self._num_in_flight())
        for fleet in self._fleets():
            for worker in fleet:
                running.add_metric([worker.info.name], fleet.running(worker))
                usable.add_metric([worker.info.name], worker.breaker.is_closed and not worker.info.draining)
        yield from (flight, running, usable)


async def exposition(own: GatewayMetrics, workers: Sequence[tuple[str, Upstream]]) -> str:
    """Workers' metrics have the label ``worker``."""
    pages = await asyncio.gather(*(_page(upstream) for _, upstream in workers))
    families: dict[str, tuple[list[str], list[str]]] = {}
    for (name, _), page in zip(workers, pages, strict=True):
        _collect(families, name, page)
    lines = [line for head, samples in families.values() for line in (*head, *samples)]
    return own.text() + "".join(f"{line}\n" for line in lines)


async def _page(upstream: Upstream) -> str:
    try:
        async with asyncio.timeout(_TIMEOUT), upstream.request("GET", "/metrics") as answer:
            page = await answer.read_all()
            return page.decode() if answer.status == 200 else ""
    except (UpstreamError, TimeoutError):
        return ""


def _collect(families: dict[str, tuple[list[str], list[str]]], worker: str, page: str) -> None:
    head: list[str] = []
    samples: list[str] = []
    label = 'worker="' + worker.replace("\\", "\\\\").replace('"', '\\"') + '"'
    for line in page.splitlines():
        if line.startswith("# HELP "):
            head, samples = families.setdefault(line.split(" ", 3)[2], ([line], []))
        elif line.startswith("# TYPE "):
            if len(head) == 1:
                head.append(line)
        elif line and not line.startswith("#") and (match := _NAME.match(line)) is not None:
            name, rest = match[0], line[match.end() :]
            rest = f"{{{label},{rest[1:]}" if rest.startswith("{") else f"{{{label}}}{rest}"
            samples.append(name + rest)
