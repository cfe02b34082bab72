"""Entries that requests read: how many, by how many threads, into which memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from vlmserve.cache import fetches as fetching
from vlmserve.cache.fetches import Buffers, Fetches, Plan
from vlmserve.cache.tiers import DiskTier, Entries
from vlmserve.steps import Bytes

SIZE = 2**18
KEYS = [bytes([number]) * 32 for number in range(12)]


def content(number: int) -> Bytes:
    return np.random.default_rng(number).integers(0, 256, SIZE, np.uint8)


@pytest.fixture
def fetches(tmp_path: Path) -> Fetches:
    return Fetches(DiskTier(Entries(tmp_path, 2**30), b"model"))


def store(fetches: Fetches, numbers: Sequence[int]) -> None:
    for number in numbers:
        fetches.tier.store(KEYS[number], SIZE, lambda number=number: content(number))
    fetches.tier.flush()


def read(fetches: Fetches, owner: str = "a") -> int:
    """Return how many of `KEYS` were read."""
    counts: list[int] = []
    fetches.begin(owner, Plan(lambda read: counts.append(read(KEYS, SIZE))))
    assert fetches.wait(60)
    assert fetches.is_done(owner)
    return counts[0]


@pytest.mark.parametrize("shared", [0, 2**40], ids=["two threads", "one thread"])
@pytest.mark.parametrize("missing", [0, 1, 7, 11, None])
def test_reading_ends_at_the_first_missing_entry(
    fetches: Fetches, monkeypatch: pytest.MonkeyPatch, shared: int, missing: int | None
) -> None:
    monkeypatch.setattr(fetching, "SHARED_BYTES", shared)
    store(fetches, [number for number in range(len(KEYS)) if number != missing])
    count = read(fetches)
    assert count == (len(KEYS) if missing is None else missing)
    for number in range(count):
        assert np.array_equal(fetches.contents[KEYS[number]], content(number))


def test_reading_ends_at_the_limit(fetches: Fetches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "SHARED_BYTES", 0)
    monkeypatch.setattr(fetching, "MAX_BYTES", 5 * SIZE)
    store(fetches, range(len(KEYS)))
    assert read(fetches) == 5
    assert len(fetches.contents) == 5
    assert not fetches.may_begin


def test_known_entries_are_not_read_again(fetches: Fetches) -> None:
    store(fetches, range(len(KEYS)))
    assert read(fetches) == len(KEYS)
    hits = fetches.tier.stats().disk_hits
    assert read(fetches, "b") == len(KEYS)
    assert fetches.tier.stats().disk_hits == hits


def test_buffers_share_no_memory() -> None:
    buffers = Buffers()
    taken = [buffers.take(size) for size in (100, SIZE, 3 * SIZE, 40 * 2**20, SIZE + 1)]
    for number, one in enumerate(taken):
        one[:] = number
    assert [len(one) for one in taken] == [100, SIZE, 3 * SIZE, 40 * 2**20, SIZE + 1]
    assert all((one == number).all() for number, one in enumerate(taken))
