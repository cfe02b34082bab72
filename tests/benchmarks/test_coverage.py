"""Counts of covered lines, from the reports of coverage.py and gcovr."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import coverage
from benchmarks.coverage import Counts, native_counts, python_counts, rows


def _file(statements: int, lines: int, branches: int, covered: int) -> dict[str, dict[str, int]]:
    numbers = (statements, lines, branches, covered)
    return {
        "summary": dict(
            zip(("num_statements", "covered_lines", "num_branches", "covered_branches"), numbers, strict=True)
        )
    }


def test_files_are_summed_by_package() -> None:
    files = {
        "src/vlmserve/cache/keys.py": _file(10, 9, 4, 2),
        "src/vlmserve/cache/blocks.py": _file(20, 20, 6, 6),
        "src/vlmserve/types.py": _file(5, 1, 0, 0),
    }
    assert python_counts({"files": files}) == {"cache": Counts(30, 29, 10, 8), coverage.TOP: Counts(5, 1, 0, 0)}


def test_rows_give_percentages_without_division_by_zero() -> None:
    native = native_counts({"line_total": 8, "line_covered": 6, "branch_total": 0, "branch_covered": 0})
    assert rows([("kernels/csrc", native)]) == [["kernels/csrc", 8, 75.0, 0, 0.0]]


def test_tests_that_cannot_run_give_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[list[str], dict[str, str]]] = []

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append((command, env))
        return subprocess.CompletedProcess(command, pytest.ExitCode.USAGE_ERROR if "pytest" in command else 0)

    for name in ("VLMSERVE_COVERAGE", "VLMSERVE_ISAS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(coverage, "FOLDER", tmp_path / "coverage")
    monkeypatch.setattr(coverage, "copy", lambda folder: folder.mkdir())
    monkeypatch.setattr(coverage.subprocess, "run", run)
    with pytest.raises(SystemExit, match="could not run"):
        coverage.measure(["tests/missing"])
    (build, building), (tests, testing) = ran
    assert "build_ext" in build
    assert "pytest" in tests
    assert building.keys() - testing.keys() == {"VLMSERVE_COVERAGE", "VLMSERVE_ISAS"}
