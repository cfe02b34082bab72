"""Figures of records whose times are known, and the files that they go into."""

from __future__ import annotations

import json
import re
from array import array

import pytest

from vlmserve.errors import ConfigurationError
from vlmserve.loadtest.figures import Summary, concurrency, histogram, series
from vlmserve.loadtest.files import as_html, as_json, as_markdown, check_paths
from vlmserve.loadtest.machine import ProcessUsage, Usage
from vlmserve.loadtest.record import Record
from vlmserve.loadtest.report import Report, make_report
from vlmserve.loadtest.run import Outcome
from vlmserve.loadtest.search import Trial
from vlmserve.loadtest.settings import GoalConfig, LoadConfig, TestConfig, parse_objective
from vlmserve.types import Missed


def record(
    sent: float, times: list[float], *, end: float | None = None, scheduled: float | None = None, **fields
) -> Record:
    """A request whose pieces came at these seconds after it was sent."""
    at = [sent + time for time in times]
    whole = sent + (end if end is not None else (times or [0.0])[-1])
    fields = {"num_tokens": len(times), "num_prompt_tokens": 10, **fields}
    return Record(sent if scheduled is None else scheduled, sent, whole, array("d", at), **fields)


def failed(sent: float, reason: str) -> Record:
    return record(sent, [], end=0.5, reason=reason, message=f"message of {reason}")


def report(*records: Record, trials: tuple[Trial, ...] = (), usage: Usage | None = None, **config) -> Report:
    seconds = max((r.end for r in records), default=0.0) - min((r.sent for r in records), default=0.0)
    outcome = Outcome(list(records), seconds, usage or Usage())
    settings = TestConfig(url="http://host", **config)
    names = {"model": "<b>tiny</b>", "url": "http://host", "started": "2026-01-01T00:00:00", "workload": "ab12"}
    return make_report(settings, outcome, trials=trials, detailed=True, **names)


def test_times_are_as_defined():
    made = report(record(0.0, [0.05, 0.06, 0.08, 0.10], end=0.11), record(1.0, [0.07], end=0.08))
    times = made.latency_ms
    assert times["ttft"].mean == pytest.approx(60)
    assert times["tpot"].count == 1
    assert times["tpot"].mean == pytest.approx(50 / 3)
    assert times["itl"].count == 3
    assert times["itl"].max == pytest.approx(20)
    assert times["e2el"].max == pytest.approx(110)
    assert "ttft_from_schedule" not in times


def test_tokens_are_those_that_the_server_counted():
    made = report(record(0.0, [0.1, 0.3], num_tokens=5))
    assert made.latency_ms["tpot"].mean == pytest.approx(50)
    assert made.output_tokens.mean == 5
    assert made.throughput.output_tokens == pytest.approx(5 / 0.3)
    assert made.throughput.input_tokens == pytest.approx(10 / 0.3)


def test_reasons_of_cache_misses_are_summed():
    told = [Missed(5, 3), Missed(2, 0, 4), None]
    made = report(*(record(0.0, [0.1], cached_tokens=1, missed_tokens=missed) for missed in told))
    assert made.missed_tokens == Missed(7, 3, 4)
    text = as_markdown(made)
    for line in ("never seen before | 7", "evicted from the cache | 3", "cached without a checkpoint | 4"):
        assert f"Input tokens {line}" in text
    assert report(record(0.0, [0.1])).missed_tokens is None


def test_an_open_loop_counts_from_the_schedule():
    made = report(record(2.0, [0.05, 0.06], scheduled=1.5), load=LoadConfig(request_rate=1))
    assert made.latency_ms["ttft"].mean == pytest.approx(50)
    assert made.latency_ms["ttft_from_schedule"].mean == pytest.approx(550)
    assert made.latency_ms["e2el_from_schedule"].mean == pytest.approx(560)
    assert made.delay_ms.max == pytest.approx(500)
    assert "it sent up to 500 ms after" in made.warnings[0]


def test_statistics_are_those_of_numpy():
    summary = Summary.of(range(1, 102))
    assert (summary.mean, summary.median, summary.p90, summary.p99, summary.max) == (51, 51, 91, 100, 101)
    assert summary.std == pytest.approx(29.15, abs=0.01)
    assert Summary.of([]) is None


def test_concurrency_is_what_ran_at_once():
    records = [record(0, [1.0]), record(0.5, [1.0]), record(1.0, [1.0])]
    assert concurrency(records) == (pytest.approx(1.5), 2)
    assert concurrency([]) == (0.0, 0)


def test_series_hold_all_there_was():
    records = [record(0.1 * n, [0.2, 0.4, 0.5], num_tokens=6) for n in range(40)] + [failed(1.0, "timeout")]
    over_time = series(records)
    width = over_time.times[1] - over_time.times[0]
    assert sum(over_time.tokens) * width == pytest.approx(240)
    assert sum(over_time.finished) * width == pytest.approx(40)
    assert sum(over_time.failed) * width == pytest.approx(1)
    assert sum(over_time.running) * width == pytest.approx(40 * 0.5 + 0.5)


def test_histograms_count_every_value():
    shape = histogram([1.0] * 500 + [2.0] * 500 + [50.0] * 3)
    assert sum(shape.counts) + shape.beyond == 1003
    assert shape.edges[-1] < 50
    assert sum(histogram([7.0]).counts) == 1
    assert histogram([]) is None


def test_goodput_counts_who_keeps_everything():
    goal = GoalConfig(slo=("ttft=100ms,tpot=20ms",))
    records = [
        record(0, [0.05, 0.06]),
        record(0, [0.2, 0.21]),
        record(0, [0.05, 0.15]),
        record(0.3, [0.05, 0.06], scheduled=0.1),  # late: the client waited
        record(0, [0.05]),
        failed(0, "timeout"),
    ]
    made = report(*records, goal=goal)
    assert made.goodput.count == 2
    assert made.goodput.share == pytest.approx(2 / 6)
    assert made.goodput.objectives_ms == {"ttft": 100, "tpot": 20}


def test_the_bound_on_gaps_is_for_the_longest():
    steady, hiccup = record(0, [0.1, 0.11, 0.12]), record(0, [0.1, 0.11, 0.2])
    assert [one.keeps({"itl": 0.05}) for one in (steady, hiccup)] == [True, False]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ttft=500ms", ("ttft", 0.5)),
        ("tpot:50", ("tpot", 0.05)),
        ("e2el = 2s", ("e2el", 2.0)),
        ("itl=1.5", ("itl", 0.0015)),
    ],
)
def test_objectives_are_written_in_two_ways(text, expected):
    assert parse_objective(text) == expected


def test_failures_are_counted_by_reason():
    made = report(failed(0, "timeout"), failed(1, "HTTP 500"), failed(2, "timeout"))
    assert [(one.reason, one.count, one.message) for one in made.failures] == [
        ("timeout", 2, "message of timeout"),
        ("HTTP 500", 1, "message of HTTP 500"),
    ]
    assert made.warnings == ["No request succeeded."]


def test_a_client_that_is_too_slow_says_so():
    usage = Usage(ProcessUsage("client", 0.95, 1.0, 1), [], [0.0, 0.5])
    [warning] = report(record(0, [0.1]), usage=usage).warnings
    assert "0.95 of one core" in warning
    assert "late for its own moments" in warning


TRIALS = (Trial(4.0, True, 1.0, 60, 100.0, 80.0, 10.0), Trial(8.0, False, 0.5, 31, why="too many missed"))
EMPTY = report()
FAILED = report(failed(0, "connection <refused>"), goal=GoalConfig(slo=("ttft=1s",)))
GOOD = report(*(record(n * 0.1, [0.1, 0.2, 0.3]) for n in range(20)), trials=TRIALS, load=LoadConfig(request_rate=10))


@pytest.mark.parametrize("made", [EMPTY, FAILED, GOOD], ids=["empty", "failed", "good"])
def test_every_report_can_be_written(made):
    assert json.loads(as_json(made))["num_good"] == made.num_good
    assert as_markdown(made).startswith("# Load test of &lt;b>tiny")
    page = as_html(made)
    assert "<b>tiny" not in page
    assert "<refused>" not in page
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1]
    assert len(json.loads(data)["points"]) == made.num_good + made.num_failed


def test_the_page_needs_nothing_else():
    page = as_html(GOOD)
    assert not re.findall(r"(?:src|href)\s*=|@import|url\(", page.partition("<script>")[0])
    assert "Rates that were tried" in page


def test_json_lists_every_request():
    requests = json.loads(as_json(GOOD))["requests"]
    assert len(requests) == 20
    assert requests[0]["times"] == pytest.approx([0.1, 0.2, 0.3])


def test_only_known_kinds_of_files_are_written(tmp_path):
    check_paths([tmp_path / "a.json", tmp_path / "b.md", tmp_path / "c.html"])
    with pytest.raises(ConfigurationError, match="html"):
        check_paths([tmp_path / "a.pdf"])
