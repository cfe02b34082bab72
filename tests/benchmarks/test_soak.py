"""The soak test runs, and finds what it looks for."""

from __future__ import annotations

import json
from collections import Counter

from benchmarks.soak import Sample, main, problems

IDLE = {"requests": [], "kv_blocks": {"used": 0}, "encoder_cache": {"pinned_images": 0}}


def samples(*engine_megabytes: float) -> list[Sample]:
    return [Sample(number, 100_000_000, int(1e6 * size)) for number, size in enumerate(engine_megabytes)]


def test_only_late_memory_growth_is_a_problem():
    assert problems(samples(100, 300, 400, 400, 410, 405), Counter(new=6), IDLE) == []
    (problem,) = problems(samples(100, 300, 400, 400, 410, 425), Counter(new=6), IDLE)
    assert problem == "the engine's memory grew by 25.0 MB in the second half"


def test_wrong_answers_and_held_blocks_are_problems():
    assert "2 x known: unexpected status 500" in problems(
        samples(1, 1), Counter({"known: unexpected status 500": 2}), IDLE
    )
    assert problems(samples(1, 1), Counter(), IDLE | {"kv_blocks": {"used": 3}})


def test_real_server_is_idle_after_mixed_requests(tmp_path, capsys):
    report = tmp_path / "report.json"
    main(["--requests", "24", "--concurrency", "8", "--json", str(report)])
    result = json.loads(report.read_text())
    assert sum(result["outcomes"].values()) == 24
    assert not [problem for problem in result["problems"] if "grew" not in problem], "so few requests only warm it up"
    assert len(result["outcomes"]) >= 6
