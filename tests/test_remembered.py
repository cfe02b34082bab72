"""Facts that are kept from one start to the next."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from vlmserve import remembered
from vlmserve.remembered import Remembered


@pytest.fixture
def facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Remembered[float]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return Remembered("facts.json", float)


def never() -> float:
    raise AssertionError("it is known")


def test_a_fact_is_measured_once(facts: Remembered[float]):
    assert facts.get("a", lambda: 1.5) == 1.5
    assert Remembered("facts.json", float).get("a", never) == 1.5


def test_processes_that_measure_together_agree(facts: Remembered[float]):
    def measure() -> float:
        assert facts.get("a", lambda: 1.0) == 1.0  # another process is faster
        return 2.0

    assert facts.get("a", measure) == 1.0
    assert facts.facts == {"a": 1.0}


def test_a_file_has_a_maximum_size(facts: Remembered[float], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remembered, "MAX_FACTS", 3)
    for number in range(5):
        facts.get(str(number), lambda: 1.0)
    assert list(facts.facts) == ["2", "3", "4"]


def test_facts_of_another_type_are_measured_again(facts: Remembered[float], caplog: pytest.LogCaptureFixture):
    Remembered("facts.json", bool).get("a", lambda: True)
    with caplog.at_level(logging.WARNING):
        assert facts.get("b", lambda: 2.0) == 2.0
    assert "cannot be read" in caplog.text
