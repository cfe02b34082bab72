"""How an answer follows its grammar."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from vlmserve.sampling.fair_workers import FairWorkers
from vlmserve.sampling.grammar import Matcher
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
