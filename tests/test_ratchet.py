"""Stored counts only fall."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.ci_scripts import load

check = load("ratchet")["check"]
STORED = {"a.py: sleep": 2, "b.py: sleep": {"count": 1, "reason": "It awaits nothing."}, "gone.py: sleep": 3}


@pytest.fixture
def counts(tmp_path: Path) -> Path:
    path = tmp_path / "counts.json"
    path.write_text(json.dumps(STORED))
    return path


def test_allowed_counts_pass(counts: Path) -> None:
    assert check(counts, {"a.py: sleep": 2, "b.py: sleep": 1}) == 0
    assert check(counts, {"new.py: lines": 500}, limit=lambda name: 500) == 0


@pytest.mark.parametrize("name", ["a.py: sleep", "b.py: sleep", "new.py: sleep"])
def test_higher_counts_fail(name: str, counts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(counts, {name: 3}) == 1
    assert name in capsys.readouterr().err


def test_other_problems_fail(counts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(counts, {}, problems=["a line"]) == 1
    assert capsys.readouterr().err == "a line\n"


def test_accepting_stores_only_lower_counts(counts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["habits.py", "--accept"])
    assert check(counts, {"a.py: sleep": 1, "b.py: sleep": 2, "new.py: sleep": 1}) == 0
    assert json.loads(counts.read_text()) == {"a.py: sleep": 1, "b.py: sleep": STORED["b.py: sleep"]}
