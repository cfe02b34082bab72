"""Step times of drafts are stored from one start to the next."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate, count
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.checkpoints import make_llama
from tests.engine.test_structured import engine_of
from vlmserve.cli.cache import clear_cache, show_cache
from vlmserve.engine import draft_costs, drafting
from vlmserve.engine.draft_costs import COSTS, LONG_SECONDS, MAX_AGE, MOST_LOADS, Curve, known_costs
from vlmserve.runner import warm_up
from vlmserve.settings.config import EngineConfig


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # Other tests time drafts once.
    monkeypatch.setattr(drafting, "known_costs", known_costs)


def costs(measure: Callable[[], Curve], key: str = "model, format and machine") -> Curve:
    return known_costs(key, measure)


def never() -> Curve:
    raise AssertionError("it is known")


def test_lowest_times_of_first_loads_count():
    busy, quiet = [(1, 0.04), (8, 0.05), (32, 0.2)], [(1, 0.03), (8, 0.06), (32, 0.09)]
    assert costs(lambda: busy) == busy
    best = [(1, 0.03), (8, 0.05), (32, 0.09)]
    assert costs(lambda: quiet) == best
    for _ in range(MOST_LOADS - 2):
        assert costs(lambda: busy) == best
    assert costs(never) == best


def test_interrupted_loads_may_lack_rows():
    assert costs(lambda: [(1, 0.1), (2, 0.2)]) == [(1, 0.1), (2, 0.2)]
    assert costs(lambda: [(1, 0.2), (4, 0.3)]) == [(1, 0.1), (2, 0.2), (4, 0.3)]


def test_long_curves_are_measured_once():
    long = [(1, LONG_SECONDS / 2), (32, LONG_SECONDS)]
    assert costs(lambda: long) == long
    assert costs(never) == long


def test_each_key_has_its_own_curve():
    for _ in range(MOST_LOADS):
        costs(lambda: [(1, 1.0)])
    assert costs(lambda: [(1, 2.0)], "other") == [(1, 2.0)]
    assert costs(never) == [(1, 1.0)]


def test_engines_share_curves_of_one_weight_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(draft_costs, "LONG_SECONDS", math.inf)  # other processes may take the processor
    folder = make_llama(tmp_path / "llama")
    keys = []
    for settings in ({}, {}, {"quantize": "int8"}, {"dtype": "bfloat16"}):
        engine_of(folder, speculation="auto", max_warm_up_seconds=1, **settings)
        keys.append({*COSTS.facts})
    assert [len(known) for known in keys] == [1, 1, 2, 3]
    assert sorted(one.loads for one in COSTS.facts.values()) == [1, 1, 2]


def test_fastest_round_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    runner = engine_of(make_llama(tmp_path / "llama")).runner
    # a start; two steps in each round; a look at the time before the second and the third round
    rounds = [0.05, 0, 0.04], [0, 0.03, 0, 0.06], [0, 0.07, 0, 0.02]
    clock = accumulate([0, *(seconds for one in rounds for seconds in (0, *one))])
    monkeypatch.setattr(warm_up, "ROUNDS_OF_DRAFTS", 3)
    monkeypatch.setattr(warm_up, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert warm_up.time_rows(runner, 3) == [(1, pytest.approx(0.03)), (2, pytest.approx(0.02))]
    assert [*clock] == []


def test_slow_steps_are_measured_with_few_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    runner = engine_of(make_llama(tmp_path / "llama")).runner
    clock = count(step=0.3)
    monkeypatch.setattr(warm_up, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert [rows for rows, _ in warm_up.time_rows(runner, 33)] == [1, 2, 4, 8]
    assert [number for number, _ in warm_up.time_layer(runner)] == [0, 1, 2, 3, 4], "each of them is needed"


def test_old_curves_are_measured_anew(monkeypatch: pytest.MonkeyPatch):
    now = 1e9
    monkeypatch.setattr(draft_costs.time, "time", lambda: now)
    for _ in range(MOST_LOADS):
        costs(lambda: [(1, 1.0)])
    now += MAX_AGE
    assert costs(never) == [(1, 1.0)]
    now += 1.0
    assert costs(lambda: [(1, 2.0)]) == [(1, 2.0)]
    now -= 100.0
    assert costs(lambda: [(1, 3.0)]) == [(1, 3.0)], "the clock was wrong before"


def test_command_shows_and_clears_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    engine = EngineConfig(weights_cache=str(tmp_path / "weights"))
    costs(lambda: [(1, 1.0)])
    show_cache(engine)
    assert f"draft costs of 1 model in {COSTS.file}" in capsys.readouterr().out
    clear_cache(engine)
    assert f"removed from {COSTS.file}" in capsys.readouterr().out
    assert not COSTS.file.exists()
    clear_cache(engine)
    show_cache(engine)
    assert "draft costs of 0 models" in capsys.readouterr().out
