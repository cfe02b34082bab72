"""Metrics of models that load on demand, in Prometheus's text format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from vlmserve.scaleout.ondemand.pool import Pool

_PREFIX = "vlmserve:model_"


def pool_metrics(pool: Pool) -> str:
    registry = CollectorRegistry()
    registry.register(_Models(pool))
    return generate_latest(registry).decode()


class _Models:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        label = ["model"]
        loaded = GaugeMetricFamily(_PREFIX + "loaded", "1 if the model is loaded.", labels=label)
        size = GaugeMetricFamily(_PREFIX + "bytes", "Memory reserved for the model; 0 if unloaded.", labels=label)
        waiting = GaugeMetricFamily(_PREFIX + "waiting", "Requests that wait for the model to load.", labels=label)
        loads = CounterMetricFamily(_PREFIX + "loads", "Loads of the model.", labels=label)
        seconds = CounterMetricFamily(_PREFIX + "load_seconds", "Seconds of all loads of the model.", labels=label)
        failures = CounterMetricFamily(_PREFIX + "load_failures", "Failed loads of the model.", labels=label)
        crashes = CounterMetricFamily(_PREFIX + "crashes", "Crashes of the model's processes.", labels=label)
        for name, model in self._pool.models.items():
            slot = model.slot
            loaded.add_metric([name], model.state == "loaded")
            size.add_metric([name], 0 if slot is None or slot.state == "unloaded" else slot.size)
            waiting.add_metric([name], len(model.waiting))
            loads.add_metric([name], model.loads)
            seconds.add_metric([name], model.load_seconds)
            failures.add_metric([name], model.failed_loads)
            crashes.add_metric([name], model.crashes)
        yield from (loaded, size, waiting, loads, seconds, failures, crashes)
