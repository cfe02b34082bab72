from collections import Counter

import psutil

from benchmarks.cluster_soak import PARTS, counts, measure, problems
from vlmserve.scaleout.messages import Feedback, Load
from vlmserve.scaleout.metrics import GatewayMetrics

MB = 1e6


def rows(**last: float) -> list[dict[str, float]]:
    """Four measurements, the last of which has other sizes."""
    same = {"seconds": 1.0, "requests": 1.0, **dict.fromkeys(PARTS, 100 * MB)}
    return [same, same, same, {**same, **last}]


def test_memory_that_grows_and_unexpected_answers_are_found():
    fine = Counter({"new": 3})
    assert problems(rows(gateway=119 * MB), fine) == []
    assert problems(rows(gcs=121 * MB), fine) == ["the memory of gcs grew by 21.0 MB in the second half"]
    assert problems(rows(), Counter({"new": 3, "new: unexpected status 503": 2})) == ["2 x new: unexpected status 503"]


def test_processes_are_measured_by_parts():
    row = measure(psutil.Process())
    assert row["rest"] > 0
    assert row["cpu"] > 0
    assert row["gcs"] == 0


def test_gateway_metrics_count_tokens():
    metrics = GatewayMetrics(list, lambda: 0)
    assert counts(metrics.text()) == {"prompt_tokens": 0, "cached_tokens": 0}
    for _ in range(2):
        metrics.count_tokens(Feedback(Load(), 100, 40))
    assert counts(metrics.text()) == {"prompt_tokens": 200, "cached_tokens": 80}
