"""How an answer follows its grammar."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from vlmserve.sampling.fair_workers import FairWorkers
from vlmserve.sampling.grammar import Allowed, Matcher
from vlmserve.sampling.guide import Guide


def test_reasoning_outlasts_a_failed_compilation() -> None:
    started: Future[Matcher] = Future()
    guide = Guide(started, FairWorkers("test", 1), "client", None, measures=True)
    started.set_exception(MemoryError())
    assert guide.pending is None
    guide.expect(lambda matcher: np.ones(4, np.bool_), left=10)
    assert guide.pending is None
    assert guide.allowed is None
    assert guide.error == "unexpected error, see the server's log"


class MadeUpMatcher:
    """A matcher without a grammar. due: whether a search for an end is."""

    error, finished, cut, complete, has_short_end = None, False, False, False, False

    def __init__(self, due: bool = False) -> None:
        self.due = due

    def search_is_due(self, left: int) -> bool:
        return self.due

    def settle(self, token_id: int) -> int:
        return token_id + 1


@pytest.fixture
def matcher() -> MadeUpMatcher:
    return MadeUpMatcher()


@pytest.fixture
def guide(matcher: MadeUpMatcher) -> Guide:
    started: Future[Any] = Future()
    guide = Guide(started, FairWorkers("test", 1), "client", None, measures=False)
    started.set_result(matcher)
    return guide


def finish(guide: Guide) -> None:
    while guide.pending is not None:
        guide.pending.result()


def test_quick_masks_are_computed_by_the_caller(guide: Guide, matcher: MadeUpMatcher) -> None:
    threads: list[int] = []

    def mask(_: Matcher) -> Allowed:
        threads.append(threading.get_ident())
        return np.ones(4, np.bool_)

    for matcher.due in (False, False, False, True):
        finish(guide)
        guide.expect(mask, left=10)
    finish(guide)
    assert [thread == threading.get_ident() for thread in threads] == [False, False, True, False]


def test_settled_token_is_the_matchers(guide: Guide) -> None:
    finish(guide)
    assert guide.settled is None
    guide.settle(3)
    finish(guide)
    assert guide.settled == 4
