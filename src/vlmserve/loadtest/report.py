from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import msgspec
import psutil

import vlmserve
from vlmserve.loadtest import figures
from vlmserve.loadtest.figures import Failure, Histogram, Point, Series, Summary
from vlmserve.loadtest.machine import ProcessUsage
from vlmserve.loadtest.record import Record
from vlmserve.loadtest.run import Outcome
from vlmserve.loadtest.search import Trial
from vlmserve.loadtest.settings import TestConfig
from vlmserve.types import Missed

_BUSY = 0.8
"""Cores in use above which the client's own work distorts the times."""
_LATE_MS = 10.0


class Throughput(msgspec.Struct, frozen=True):
    """Complete answers and tokens, per second."""

    requests: float
    input_tokens: float
    output_tokens: float


class Goodput(msgspec.Struct, frozen=True):
    """Requests that met all objectives. share: of ended requests. requests: per second."""

    objectives_ms: dict[str, float]
    count: int
    share: float
    requests: float


class Concurrency(msgspec.Struct, frozen=True):
    mean: float
    peak: int


class Report(msgspec.Struct):
    """workload: digest of all requests. latency_ms: by metric, see docs/loadtest.md. lag_ms: of the client's timer.
    delay_ms: of requests in an open loop. requests: if requested.
    """

    url: str
    model: str
    started: str
    settings: dict[str, Any]
    workload: str
    machine: str
    version: str
    seconds: float
    num_good: int
    num_failed: int
    num_unfinished: int
    stopped: str | None
    failures: list[Failure]
    throughput: Throughput
    goodput: Goodput | None
    concurrency: Concurrency
    latency_ms: dict[str, Summary | None]
    input_tokens: Summary | None
    output_tokens: Summary | None
    cached_tokens: int | None
    missed_tokens: Missed | None
    num_images: int
    client: ProcessUsage
    server: list[ProcessUsage]
    lag_ms: Summary | None
    delay_ms: Summary | None
    notes: list[str]
    warnings: list[str]
    series: Series
    histograms: dict[str, Histogram | None]
    points: list[Point]
    trials: list[Trial]
    requests: list[Record] | None = None


def make_report(
    config: TestConfig,
    outcome: Outcome,
    *,
    model: str,
    url: str,
    started: str,
    workload: str,
    notes: Sequence[str] = (),
    trials: Sequence[Trial] = (),
    detailed: bool = False,
) -> Report:
    """started: date and time. detailed: keep every request."""
    records = outcome.records
    good = [record for record in records if record.is_good]
    latencies = figures.latencies(records)
    if not config.is_open:
        latencies = {name: values for name, values in latencies.items() if "schedule" not in name}
    cached = [record.cached_tokens for record in good if record.cached_tokens is not None]
    missed = [record.missed_tokens for record in good if record.missed_tokens is not None]
    report = Report(
        url=url,
        model=model,
        started=started,
        settings=_settings(config),
        workload=workload,
        machine=f"{platform.system()}, {psutil.cpu_count()} cores, Python {platform.python_version()}",
        version=vlmserve.__version__,
        seconds=outcome.seconds,
        num_good=len(good),
        num_failed=len(records) - len(good),
        num_unfinished=outcome.unfinished,
        stopped=outcome.stopped,
        failures=figures.failures(records),
        throughput=throughput(good, outcome.seconds),
        goodput=goodput(config, records, outcome.seconds),
        concurrency=Concurrency(*figures.concurrency(records)),
        latency_ms={name: Summary.of(values) for name, values in latencies.items()},
        input_tokens=Summary.of(r.num_prompt_tokens for r in good if r.num_prompt_tokens is not None),
        output_tokens=Summary.of(record.num_tokens for record in good),
        cached_tokens=sum(cached) if cached else None,
        missed_tokens=sum(missed[1:], missed[0]) if missed else None,
        num_images=sum(record.num_images for record in good),
        client=outcome.usage.client,
        server=outcome.usage.server,
        lag_ms=Summary.of(lag * 1e3 for lag in outcome.usage.lags),
        delay_ms=Summary.of(record.delay * 1e3 for record in records) if config.is_open else None,
        notes=list(notes),
        warnings=[],
        series=figures.series(records),
        histograms={name: figures.histogram(latencies[name]) for name in ("ttft", "tpot", "itl", "e2el")},
        points=figures.points(records),
        trials=list(trials),
        requests=list(records) if detailed else None,
    )
    report.warnings = _warnings(report, config)
    return report


def throughput(good: Sequence[Record], seconds: float) -> Throughput:
    if seconds <= 0:
        return Throughput(0.0, 0.0, 0.0)
    return Throughput(
        len(good) / seconds,
        sum(record.num_prompt_tokens or 0 for record in good) / seconds,
        sum(record.num_tokens for record in good) / seconds,
    )


def goodput(config: TestConfig, records: Sequence[Record], seconds: float) -> Goodput | None:
    objectives = config.goal.objectives
    if not objectives:
        return None
    count = sum(record.keeps(objectives) for record in records)
    bounds = {name: bound * 1e3 for name, bound in objectives.items()}
    return Goodput(bounds, count, count / len(records) if records else 0.0, count / seconds if seconds > 0 else 0.0)


def client_limits(client: ProcessUsage, lag_ms: Summary | None, delay_ms: Summary | None) -> list[str]:
    """Signs that the client limited the results."""
    found = []
    if client.cores is not None and client.cores > _BUSY:
        found.append(f"it used {client.cores:.2f} of one core")
    if lag_ms is not None and lag_ms.p99 > _LATE_MS:
        found.append(f"it was up to {lag_ms.p99:.0f} ms late for its own moments (99th percentile)")
    if delay_ms is not None and delay_ms.p99 > _LATE_MS:
        found.append(f"it sent up to {delay_ms.p99:.0f} ms after the requests' time (99th percentile)")
    return found


def _warnings(report: Report, config: TestConfig) -> list[str]:
    warnings = []
    # With --max-concurrency, delays are intended.
    delay = None if config.load.max_concurrency is not None else report.delay_ms
    if limits := client_limits(report.client, report.lag_ms, delay):
        warnings.append(
            f"The client was a bottleneck: {', and '.join(limits)}. Its times are upper bounds of the server's; use "
            "another machine for it, or several."
        )
    places = config.load.max_concurrency
    if config.is_open and places is not None and report.concurrency.peak >= places:
        warnings.append(
            f"All {places} places of --max-concurrency were taken at times, and requests were sent late; times from "
            "the schedule count that."
        )
    if report.num_good + report.num_failed == 0:
        warnings.append("No request ended: there is nothing to report.")
    elif report.num_good == 0:
        warnings.append("No request succeeded.")
    if report.stopped is not None:
        gave_up = f"; {report.num_unfinished} in flight were cancelled" if report.num_unfinished else ""
        warnings.append(f"Not everything was sent: {report.stopped}{gave_up}.")
    return warnings


def _settings(config: TestConfig) -> dict[str, Any]:
    """Changed settings, without secrets. JSON has no infinity: "inf"."""
    settings: dict[str, Any] = {}
    for part in (config.target, config.workload, config.load, config.goal):
        chosen = part.model_dump(exclude_defaults=True, exclude={"api_key", "header"})
        settings |= {name: "inf" if value == float("inf") else value for name, value in chosen.items()}
    return settings
