"""CI names tests that passed only on their second try."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tests.conftest

SCRIPT = Path(__file__).parent.parent / ".ci/tests.py"
FLAKY = """
from pathlib import Path

def test_good():
    pass

def test_flaky():
    tried = Path("tried")
    if not tried.exists():
        tried.touch()
        raise AssertionError
"""
DIED = """
def pytest_terminal_summary(config):
    config.cache.set("vlmserve/died", ["test_all.py::test_good"])
"""


@pytest.mark.parametrize(
    ("tests", "code", "named"),
    [
        (f"{DIED}\n{FLAKY}", 0, "test_all.py::test_flaky\ntest_all.py::test_good (its process died)\n"),
        (f"{FLAKY}\ndef test_bad(): assert False", 1, "test_all.py::test_flaky\n"),
        ("not Python", 1, ""),
    ],
)
def test_second_tries_that_pass_are_named(
    tests: str, code: int, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "test_all.py").write_text(tests)
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "Makefile").write_text(f"test:\n\t@{sys.executable} -m pytest -p test_all\n")
    report = tmp_path / "report.txt"
    done = subprocess.run([sys.executable, SCRIPT, report], cwd=tmp_path, capture_output=True, text=True)
    assert bool(done.returncode) == bool(code), done.stdout
    assert report.read_text() == named


def test_dead_processes_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tests.conftest, "CRASHED", ["tests/test_one.py::test_it"])
    remembered: dict[str, Any] = {}
    lines: list[str] = []
    config: Any = SimpleNamespace(cache=SimpleNamespace(set=remembered.__setitem__), getoption=lambda name: False)
    tests.conftest.pytest_terminal_summary(SimpleNamespace(write_line=lines.append), config)  # type: ignore[arg-type]
    assert remembered == {"vlmserve/died": ["tests/test_one.py::test_it"]}
    assert len(lines) == 1
