"""Workers of the tests are forked once the tests are collected."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CONFTEST = "from tests.forked_workers import fork_workers as pytest_xdist_setupnodes"
TESTS = """
import os
import sys
from pathlib import Path

import pytest

with Path("imported").open("a") as file:
    file.write(f"{os.getpid()}\\n")

@pytest.mark.parametrize("number", range(4))
def test_printed(number, worker_id, testrun_uid, tmp_path):
    print(f"printed by {number}")
    Path(f"{worker_id}-{os.getppid()}").touch()
    assert worker_id != "none" != testrun_uid
    assert tmp_path.parent.name == f"popen-{worker_id}"
    assert number != 3
"""
DIES = """
def test_killed():
    died = Path("died")
    if not died.exists():
        died.touch()
        os.kill(os.getpid(), 9)
"""


def run(folder: Path, tests: str, monkeypatch: pytest.MonkeyPatch) -> subprocess.CompletedProcess[str]:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_all.py").write_text(tests)
    (folder / "pytest.ini").touch()
    command = [sys.executable, "-m", "pytest", "-p", "xdist.plugin", "-n", "2", "-rfE", "--basetemp", "files"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_workers_share_one_import_and_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(tmp_path, TESTS, monkeypatch)
    assert "1 failed, 3 passed" in done.stdout, done.stdout + done.stderr
    assert "FAILED test_all.py::test_printed[3]" in done.stdout
    assert [text for text in ("0", "1", "2", "3") if f"printed by {text}" in done.stdout] == ["3"]
    [collecting] = (tmp_path / "imported").read_text().split()
    assert {path.name for path in tmp_path.glob("gw*")} == {f"gw{number}-{collecting}" for number in range(2)}


def test_dead_worker_is_replaced_by_a_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(tmp_path, TESTS.replace("number != 3", "True") + DIES, monkeypatch)
    assert "worker 'gw" in done.stdout, done.stdout + done.stderr
    assert "1 failed, 4 passed" in done.stdout
    assert len((tmp_path / "imported").read_text().split()) == 1


@pytest.mark.parametrize("tests", ["not Python", "import pytest\npytest.exit('enough')"])
def test_files_that_cannot_be_imported_are_named(tests: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(tmp_path, tests, monkeypatch)
    assert done.returncode not in (0, 5)
    assert "test_all.py" in done.stdout or "enough" in done.stdout, done.stdout + done.stderr
