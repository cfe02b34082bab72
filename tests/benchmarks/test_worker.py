"""Processes that benchmarks measure in turns."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.worker import Worker, start_workers

SLEEPER = "tests.benchmarks.sleeper"


def test_worker_reports_its_seconds(tmp_path: Path) -> None:
    with Worker("sleeper", SLEEPER, [], tmp_path / "log") as worker:
        assert worker.seconds_to_ready < 60
        assert worker.run(seconds=0.05) >= 0.05
        assert worker.run(seconds=0) >= 0
    assert (tmp_path / "log").read_text() == "starting\n"


def test_one_that_ends_is_an_error(tmp_path: Path) -> None:
    with Worker("sleeper", SLEEPER, [], tmp_path / "log") as worker, pytest.raises(RuntimeError, match="sleeper ended"):
        worker.run(seconds=-1)


def test_unstartable_worker_is_reported_and_skipped(tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    with start_workers(SLEEPER, {"well": [], "unwell": ["broken"]}, tmp_path, console) as workers:
        assert [worker.name for worker in workers] == ["well"]
    assert "unwell ended with status 1 before it was ready" in console.export_text()
    assert "nothing to load" in (tmp_path / "unwell.log").read_text()
