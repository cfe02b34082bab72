"""Which lines and branches the tests reach, in Python and in the native kernels.

    make coverage                                  # all tests; prints a table and writes build/coverage/python
    make coverage ARGS="tests/cache tests/scheduler"

The tests run in a copy of the repository whose kernels are compiled for gcov. Processes that tests start count as well.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.command import keep, show_rows
from benchmarks.mutations import copy
from benchmarks.peers import version

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build/coverage"
SETTINGS = """\
[run]
branch = True
source = vlmserve
parallel = True
patch = subprocess, _exit
sigterm = True
data_file = {folder}/data/python
[report]
exclude_also =
    if TYPE_CHECKING:
    @abstractmethod
    raise NotImplementedError
    ^\\s*\\.\\.\\.$
"""


class Counts(NamedTuple):
    lines: int
    lines_reached: int
    branches: int
    branches_reached: int

    def plus(self, other: Counts) -> Counts:
        return Counts(*(ours + theirs for ours, theirs in zip(self, other, strict=True)))


NONE = Counts(0, 0, 0, 0)
ALL = ["tests"]
TOP = "top-level modules"
COLUMNS = ("Package", "Lines", "Lines, percent", "Branches", "Branches, percent")
NOTES = (
    "Not counted: isolated processes, which decode media and compile grammars (`media/isolated_*.py`, "
    "`sampling/isolated_grammar.py`), and GPU code other than Triton kernels, which run in an interpreter. Native "
    "kernels: only this machine's instruction sets. Branches of C++ include those of exceptions."
)


def python_counts(report: Mapping[str, Any]) -> dict[str, Counts]:
    """Counts of each package, from the JSON report of coverage.py."""
    found: defaultdict[str, Counts] = defaultdict(lambda: NONE)
    for path, file in report["files"].items():
        parts = Path(path).parts
        parts = parts[parts.index("vlmserve") + 1 :]
        total, name = file["summary"], parts[0] if len(parts) > 1 else TOP
        found[name] = found[name].plus(
            Counts(total["num_statements"], total["covered_lines"], total["num_branches"], total["covered_branches"])
        )
    return dict(found)


def native_counts(report: Mapping[str, Any]) -> Counts:
    """Counts of all kernels, from the JSON summary of gcovr. A header counts once for all instruction sets."""
    return Counts(report["line_total"], report["line_covered"], report["branch_total"], report["branch_covered"])


def rows(counts: Iterable[tuple[str, Counts]]) -> list[list[Any]]:
    """Name, lines, percent reached, branches, percent reached."""
    return [
        [
            name,
            one.lines,
            round(100 * one.lines_reached / max(one.lines, 1), 1),
            one.branches,
            round(100 * one.branches_reached / max(one.branches, 1), 1),
        ]
        for name, one in counts
    ]


def measure(tests: Sequence[str]) -> dict[str, Any]:
    """Run the tests, of which some may fail. Raises SystemExit if the kernels cannot be compiled, or no test runs."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    copied, data = FOLDER / "copy", FOLDER / "data"
    data.mkdir(parents=True)
    copy(copied)
    settings = FOLDER / "settings.ini"
    settings.write_text(SETTINGS.format(folder=FOLDER))
    environment = {**os.environ, "PYTHONPATH": str(copied / "src"), "COVERAGE_RCFILE": str(settings)}

    def run(*command: str, **more: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *command], cwd=copied, env=environment, text=True, **more)

    build = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", "--force"],
        cwd=copied,
        env={**environment, "VLMSERVE_COVERAGE": "1", "VLMSERVE_ISAS": "here"},
    )
    if build.returncode:
        raise SystemExit("the kernels cannot be compiled for gcov")
    workers = ("--numprocesses", str(os.cpu_count() or 1), "--dist", "loadfile")
    tested = run("-m", "coverage", "run", "-m", "pytest", "-q", "--timeout", "900", *workers, *tests)
    if tested.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit("the tests could not run")
    run("-m", "coverage", "combine", "--quiet", str(data))
    run("-m", "coverage", "json", "--quiet", "-o", str(FOLDER / "python.json"))
    run("-m", "coverage", "html", "--quiet", "-d", str(FOLDER / "python"))
    native = run(
        "-m", "gcovr", "--root", "src/vlmserve/kernels/csrc", "--json-summary", "--merge-mode-functions", "separate",
        "--gcov-ignore-parse-errors", "all", "build", check=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    python = python_counts(json.loads((FOLDER / "python.json").read_text()))
    total = NONE
    for one in python.values():
        total = total.plus(one)
    named = [
        *sorted(python.items()),
        ("all of Python", total),
        ("kernels/csrc", native_counts(json.loads(native.stdout))),
    ]
    return {
        "title": "Lines and branches that tests reach",
        "command": "make coverage" if list(tests) == ALL else f'make coverage ARGS="{" ".join(tests)}"',
        "model": "",
        "weights": "",
        "versions": {name: version(name) for name in ("coverage", "gcovr", "vlmserve")},
        "columns": list(COLUMNS),
        "rows": rows(named),
        "exact": False,
        "notes": NOTES if tested.returncode == pytest.ExitCode.OK else f"{NOTES} Some tests failed.",
        "plot": ["Lines, percent"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    parser.add_argument("tests", nargs="*", default=ALL)
    options = parser.parse_args()
    report = measure(options.tests)
    show_rows(report)
    keep(report, options)


if __name__ == "__main__":
    main()
