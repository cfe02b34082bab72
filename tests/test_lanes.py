"""Files that the fast lane leaves out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import pytest_collection_modifyitems, pytest_ignore_collect
from tests.lanes import LONGEST, SLOW

TESTS = Path(__file__).parent


class Asked:
    """The settings of a run with or without ``--fast``."""

    def __init__(self, fast: bool) -> None:
        self._fast = fast

    def getoption(self, name: str) -> bool:
        assert name == "fast"
        return self._fast


def left_out(fast: bool) -> set[str]:
    return {
        path.relative_to(TESTS).as_posix()
        for path in TESTS.rglob("test_*.py")
        if pytest_ignore_collect(path, Asked(fast))  # type: ignore[arg-type]
    }


def test_the_fast_lane_leaves_out_listed_files() -> None:
    assert left_out(fast=True) == SLOW


def test_the_whole_suite_leaves_out_nothing() -> None:
    assert left_out(fast=False) == set()


@pytest.mark.parametrize("part", ["kernels", "scheduler", "cache", "runner", "quant", "prompt", "server", "engine"])
def test_each_part_has_tests_in_the_fast_lane(part: str) -> None:
    assert {path.relative_to(TESTS).as_posix() for path in (TESTS / part).glob("test_*.py")} - SLOW


def test_workers_begin_with_the_longest_files() -> None:
    assert SLOW.issuperset(LONGEST)
    slow = min(SLOW.difference(LONGEST))
    names = ["test_lanes.py", slow, LONGEST[1], LONGEST[0]]
    items = [SimpleNamespace(path=TESTS / name) for name in names]
    worker = SimpleNamespace(workerinput={}, option=SimpleNamespace(markexpr="gpu"))
    pytest_collection_modifyitems(worker, items)  # type: ignore[arg-type]
    assert [item.path.relative_to(TESTS).as_posix() for item in items] == names[::-1]
