"""Mutations: where they are made, what counts as noticed, and the report."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import mutations
from benchmarks.mutations import Folder, Mutation, Reached, annotated, report

MODULE = """\
from __future__ import annotations

def larger(first: int | None, second: int) -> int | float:
    limit: int | str = 3 | 4
    return max(first or limit, second)
"""
ORIGINAL = "def double(number):\n    return 2 * number\n\ndef triple(number):\n    return 3 * number\n"
TESTS = """\
from doubled import double

def test_double():
    assert double(3) == 6

def test_negative():
    assert double(-3) == -6
"""
SOURCE, OTHER = "src/vlmserve/cache", "src/vlmserve/scheduler"


def test_annotations_are_left_out() -> None:
    lines = MODULE.splitlines()
    found = {lines[line - 1][column:].split()[0] for line, column in annotated(ast.parse(MODULE))}
    assert found == {"|", "int", "None,", "int)", "float:", "str"}
    assert (4, lines[3].index("3")) not in annotated(ast.parse(MODULE))


def test_statements_begin_in_their_first_line() -> None:
    tree = ast.parse("def f(x):\n    if x:\n        return (\n            x +\n            1\n        )\n")
    assert [mutations.statement(tree, line) for line in (1, 2, 4, 5)] == [1, 2, 3, 3]


NAMES = ("test_doubled.py::test_double", "test_doubled.py::test_negative")
REACHED = Reached(dict(zip(NAMES, (2.0, 1.0), strict=True)), {"doubled.py": {"1": [""], "2": [*NAMES], "4": [""]}})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    """A module and its tests."""
    path = tmp_path_factory.mktemp("repository")
    (path / "doubled.py").write_text(ORIGINAL)
    (path / "test_doubled.py").write_text(TESTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mutations, "ROOT", path)
        patch.setattr(mutations, "PACKAGES", {"doubled.py": ("test_doubled.py",)})
        patch.setattr(mutations, "LIBRARIES", ("pytest",))
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        folder = Folder(path)
        yield folder
        folder.close()


def test_recording_finds_the_tests_of_lines(folder: Folder) -> None:
    pytest.importorskip("coverage", reason="make mutations installs coverage")
    reached = folder.record("doubled.py")
    assert {line: sorted(tests) for line, tests in reached.lines["doubled.py"].items()} == REACHED.lines["doubled.py"]
    assert sorted(reached.seconds) == sorted(NAMES)


def test_quick_tests_of_a_line_come_first(folder: Folder) -> None:
    tests = [REACHED.tests(Mutation("doubled.py", "doubled.py", line, "", "")) for line in (2, 1, 5)]
    assert tests == [[*reversed(NAMES)], None, []]


@pytest.mark.parametrize(
    ("line", "original", "mutated", "survives"),
    [
        (2, "2 * number", "number + number", True),
        (2, "2 * number", "number + 3", False),
        (1, "def", "class of", False),
        (5, "3 * number", "4 * number", True),
    ],
    ids=["equal", "other", "broken", "untested"],
)
def test_tests_decide_what_survives(folder: Folder, line: int, original: str, mutated: str, survives: bool) -> None:
    mutation = Mutation("doubled.py", "doubled.py", line, "", ORIGINAL.replace(original, mutated, 1))
    assert folder.survives(mutation, REACHED) is survives
    assert (folder.path / "doubled.py").read_text() == ORIGINAL


def test_report_gives_shares_for_each_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    monkeypatch.setattr(mutations, "PACKAGES", {OTHER: (), SOURCE: ()})
    (tmp_path / "a.py").write_text("x = 1\ny = 2\n")
    text = "x = 1\ny = {}\n"
    made = [Mutation(source, "a.py", 2, "", text.format(n)) for n, source in enumerate([SOURCE] * 3 + [OTHER])]
    found = report(made, made[:2], {made[0]: "0 means 2."})
    assert found["rows"] == [
        [f"`{OTHER}`", 1, 1, 0, 0, 100.0],
        [f"`{SOURCE}`", 3, 1, 1, 1, 50.0],
        ["all", 4, 2, 1, 1, 66.7],
    ]
    assert found["notes"] == "- `a.py`, `y = 0`: 0 means 2."


def test_equal_mutations_are_found_by_their_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    monkeypatch.setattr(mutations, "EQUIVALENT", tmp_path / "equal.toml")
    (tmp_path / "a.py").write_text("x = 1\nif x:\n    y = 2\n")
    (tmp_path / "equal.toml").write_text(
        '[[equivalent]]\npath = "a.py"\noriginal = "y = 2"\nmutated = "y = 3"\nreason = "y is not read."\n'
    )
    made = [Mutation(SOURCE, "a.py", 3, "", f"x = 1\nif x:\n    y = {value}\n") for value in (3, 4)]
    assert mutations.equivalent(made) == {made[0]: "y is not read."}
