"""Mutations: where they are made, what counts as noticed, and the report."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks import mutations
from benchmarks.mutations import Mutation, annotated, report, survives

MODULE = """\
from __future__ import annotations

def larger(first: int | None, second: int) -> int | float:
    limit: int | str = 3 | 4
    return max(first or limit, second)
"""
SOURCE = "src/vlmserve/cache"


def test_annotations_are_left_out() -> None:
    lines = MODULE.splitlines()
    found = {lines[line - 1][column:].split()[0] for line, column in annotated(ast.parse(MODULE))}
    assert found == {"|", "int", "None,", "int)", "float:", "str"}
    assert (4, lines[3].index("3")) not in annotated(ast.parse(MODULE))


@pytest.mark.parametrize(
    ("mutated", "survived"),
    [
        ("def double(number):\n    return number + number\n", True),
        ("def double(number):\n    return number + 1\n", False),
        ("def double(number)\n", False),
    ],
)
def test_tests_decide_what_survives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutated: str, survived: bool
) -> None:
    original = "def double(number):\n    return 2 * number\n"
    (tmp_path / "doubled.py").write_text(original)
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--fast', action='store_true')\n"
    )
    (tmp_path / "test_doubled.py").write_text(
        "from doubled import double\n\ndef test_double():\n    assert double(3) == 6\n"
    )
    monkeypatch.setattr(mutations, "PACKAGES", {SOURCE: ("test_doubled.py",)})
    monkeypatch.setattr(mutations, "WIDER", ("test_doubled.py",))
    assert survives(Mutation(SOURCE, "doubled.py", 2, "made up", mutated), tmp_path) is survived
    assert (tmp_path / "doubled.py").read_text() == original


def test_report_gives_shares_for_each_source() -> None:
    made = [Mutation(source, "a.py", 1, "made up", "") for source in [SOURCE] * 3 + ["src/vlmserve/scheduler"]]
    assert report(made, made[:1])["rows"] == [
        ["`src/vlmserve/scheduler`", 1, 1, 100],
        [f"`{SOURCE}`", 3, 2, 67],
        ["all", 4, 3, 75],
    ]
