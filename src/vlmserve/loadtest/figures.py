"""Computes figures, in milliseconds, from records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from vlmserve.loadtest.record import Record

PERCENTILES = (50, 90, 95, 99)
_BINS = 40
_SHOWN = 99.0
"""Percentile at the right end of histograms, so that one straggler does not squeeze the rest into a bar."""
_BUCKETS = 100
_POINTS = 2000

Numbers = npt.NDArray[np.float64]


class Summary(msgspec.Struct, frozen=True):
    """Statistics; std is the population's."""

    count: int
    mean: float
    std: float
    min: float
    median: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Summary | None:
        array = np.fromiter(values, np.float64)
        if not array.size:
            return None
        median, p90, p95, p99 = map(float, np.percentile(array, PERCENTILES))
        mean, std, low, high = map(float, (array.mean(), array.std(), array.min(), array.max()))
        return cls(array.size, mean, std, low, median, p90, p95, p99, high)


class Failure(msgspec.Struct, frozen=True):
    """Requests that failed alike. message: the first's."""

    reason: str
    count: int
    message: str


class Histogram(msgspec.Struct, frozen=True):
    """edges: one more than counts. beyond: values above the last edge."""

    edges: list[float]
    counts: list[int]
    beyond: int


class Series(msgspec.Struct, frozen=True):
    """The test in buckets. times: their middles, in seconds. Other fields: per second."""

    times: list[float]
    running: list[float]
    finished: list[float]
    failed: list[float]
    tokens: list[float]


class Point(msgspec.Struct, frozen=True):
    """One request. sent: seconds after the start."""

    sent: float
    ttft_ms: float | None
    e2el_ms: float
    is_good: bool


def failures(records: Iterable[Record]) -> list[Failure]:
    """Most frequent first."""
    failed = [record for record in records if record.reason is not None]
    messages: dict[str, str] = {}
    for record in failed:
        messages.setdefault(str(record.reason), record.message)
    return [Failure(r, count, messages[r]) for r, count in Counter(str(f.reason) for f in failed).most_common()]


def latencies(records: Sequence[Record]) -> dict[str, list[float]]:
    """Milliseconds of complete answers, by metric.

    Times from the schedule start at the planned time, so they include delays by the client.
    """
    good = [record for record in records if record.is_good]
    first = [(record, ttft) for record in good if (ttft := record.ttft) is not None]
    seconds = {
        "ttft": [ttft for _, ttft in first],
        "tpot": [tpot for record in good if (tpot := record.tpot) is not None],
        "itl": [gap for record in good for gap in record.gaps()],
        "e2el": [record.e2el for record in good],
        "ttft_from_schedule": [ttft + record.delay for record, ttft in first],
        "e2el_from_schedule": [record.e2el + record.delay for record in good],
    }
    return {name: [value * 1e3 for value in values] for name, values in seconds.items()}


def histogram(values: Sequence[float]) -> Histogram | None:
    if not values:
        return None
    array = np.asarray(values)
    low, high = float(array.min()), float(np.percentile(array, _SHOWN))
    if high - low < 1e-3 * max(high, 1e-3):
        low, high = low * 0.95, max(high * 1.05, low + 1e-3)
    counts, edges = np.histogram(array, bins=_BINS, range=(low, high))
    return Histogram(edges.tolist(), counts.tolist(), int((array > high).sum()))


def concurrency(records: Sequence[Record]) -> tuple[float, int]:
    """Mean and maximum of running requests."""
    if not records:
        return 0.0, 0
    sent = np.array([record.sent for record in records])
    ended = np.array([record.end for record in records])
    span = float(ended.max() - sent.min())
    # Count ends before starts at the same moment.
    events = sorted([(at, 1) for at in sent] + [(at, -1) for at in ended])
    running = np.cumsum([change for _, change in events])
    return (float((ended - sent).sum() / span) if span > 0 else 1.0), int(running.max())


def series(records: Sequence[Record]) -> Series:
    """Split the test into about `_BUCKETS` buckets."""
    if not records:
        return Series([], [], [], [], [])
    sent = np.array([record.sent for record in records])
    ended = np.array([record.end for record in records])
    good = np.array([record.is_good for record in records])
    width = max(float(ended.max()) / _BUCKETS, 0.05)
    edges = np.arange(int(np.ceil(ended.max() / width)) + 1) * width

    def rate(times: Numbers, weights: Numbers | None = None) -> list[float]:
        return [float(count) / width for count in np.histogram(times, edges, weights=weights)[0]]

    times = np.concatenate([np.asarray(record.times) for record in records] or [np.empty(0)])
    weights = [np.full(len(r.times), r.num_tokens / len(r.times) if r.num_tokens else 1.0) for r in records if r.times]
    # Seconds that requests ran until each edge; the rise over a bucket gives the mean running requests.
    spent = np.array([np.clip(edge - sent, 0, ended - sent).sum() for edge in edges])
    return Series(
        times=[float(edge) for edge in edges[:-1] + width / 2],
        running=[float(rise) / width for rise in np.diff(spent)],
        finished=rate(ended[good]),
        failed=rate(ended[~good]),
        tokens=rate(times, np.concatenate(weights or [np.empty(0)])),
    )


def points(records: Sequence[Record]) -> list[Point]:
    """Requests as sent, thinned to about `_POINTS`."""
    chosen = sorted(records, key=lambda record: record.sent)[:: max(1, -(-len(records) // _POINTS))]
    return [Point(r.sent, None if (ttft := r.ttft) is None else ttft * 1e3, r.e2el * 1e3, r.is_good) for r in chosen]
