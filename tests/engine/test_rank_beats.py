"""Heartbeats of ranks."""

from __future__ import annotations

import os
import threading

import pytest

from tests.waiting import wait_until
from vlmserve.engine import rank_beats
from vlmserve.engine.rank_beats import RankBeats, RankWatch, beat


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_beats, "INTERVAL", 0.05)


def test_a_silent_rank_is_reported_once() -> None:
    beating, silent = RankBeats(), RankBeats()
    threading.Thread(target=beat, args=(beating.theirs,), daemon=True).start()
    os.write(silent.theirs, b".")
    hangs: list[tuple[int, float]] = []
    watch = RankWatch([beating, silent], 1.0, lambda index, silence: hangs.append((index, silence)))
    wait_until(lambda: watch.silence >= 1.5)
    watch.close()
    assert [index for index, _ in hangs] == [1]
    assert beating.silence < 1 <= hangs[0][1]
    os.close(silent.theirs)


def test_a_rank_that_still_starts_is_not_silent() -> None:
    starting = RankBeats()
    for _ in range(100):
        starting.look()
    assert starting.silence == 0
    starting.close()
    os.close(starting.theirs)


def test_beats_end_with_their_reader() -> None:
    beats = RankBeats()
    thread = threading.Thread(target=beat, args=(beats.theirs,), daemon=True)
    thread.start()
    beats.close()
    thread.join(10)
    assert not thread.is_alive()
    os.close(beats.theirs)
