"""Requests whose KV blocks are on disk, next to requests that have nothing there."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from tests.scheduler.made_up import BLOCK, FixedLimits, TestedScheduler, finish, image, plan, request, run, scheduler
from tests.waiting import wait_until
from vlmserve.cache import fetches as fetching
from vlmserve.cache.fetches import Fetches
from vlmserve.cache.tiers import Buffer, DiskTier, Entries
from vlmserve.scheduler.request import Request
from vlmserve.scheduler.resources.stored import EntryBytes, Stored
from vlmserve.steps import Bytes

BLOCK_BYTES = 50


class GatedTier(DiskTier):
    """Reads wait for a gate."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Entries(folder, 2**20), b"model")
        self.gate = threading.Event()

    def read(self, key: bytes, size: int, *buffer: Buffer) -> Bytes | None:
        assert self.gate.wait(60)
        return super().read(key, size, *buffer)


@pytest.fixture
def fetches(tmp_path: Path) -> Fetches:
    return Fetches(GatedTier(tmp_path))


@pytest.fixture
def s(fetches: Fetches) -> TestedScheduler:
    plain = scheduler(budget=8, prefix_caching=True)
    plain.memory.stores = []
    plain.memory.cache.stored = fetches.contents
    stored = Stored(fetches, plain.images, plain.memory, EntryBytes(BLOCK_BYTES))
    return TestedScheduler(plain.memory, plain.images, stored, seqs=16, budget=8)


def known(fetches: Fetches, name: str, length: int, num_blocks: int, **fields: int) -> Request:
    """A request whose first blocks are on disk."""
    one = request(name, length, salt=name, **fields)
    for key in one.keys_of_full_blocks(one.chains[0], num_blocks, BLOCK):
        fetches.tier.store(key, BLOCK_BYTES, lambda: np.zeros(BLOCK_BYTES, np.uint8))
    fetches.tier.flush()
    return one


def gate(fetches: Fetches) -> threading.Event:
    assert isinstance(fetches.tier, GatedTier)
    return fetches.tier.gate


def begin(s: TestedScheduler) -> None:
    """Run the first step that has something to compute."""
    while not run(s)[0].has_work:
        s.resources.wait(1)


def test_requests_overtake_any_number_of_readers(s: TestedScheduler, fetches: Fetches) -> None:
    names = [str(number) for number in range(2 * fetching.NUM_READERS)]
    for name in names:
        s.add(known(fetches, name, 9, 2))
    s.add(request("new", 3))
    assert plan(run(s)[0]) == [("new", 3)]
    gate(fetches).set()
    while len(s):
        begin(s)
    assert s.memory.cached_tokens == 2 * BLOCK * len(names)


def test_blocks_are_forgotten_once_memory_has_them(s: TestedScheduler, fetches: Fetches) -> None:
    gate(fetches).set()
    s.add(known(fetches, "a", 40, 2))
    begin(s)
    assert s.requests["a"].num_computed == 2 * BLOCK + 8
    assert not fetches.contents


def test_resumed_requests_keep_nothing_that_was_read(s: TestedScheduler, fetches: Fetches) -> None:
    gate(fetches).set()
    resumed = known(fetches, "a", 5, 1, max_tokens=50)
    resumed.token_ids += [7] * 20  # it has generated these before
    for key in resumed.keys_of_full_blocks(resumed.chains[0], 6, BLOCK):
        fetches.tier.store(key, BLOCK_BYTES, lambda: np.zeros(BLOCK_BYTES, np.uint8))
    fetches.tier.flush()
    s.add(resumed)
    begin(s)
    assert s.requests["a"].num_computed > 6 * BLOCK
    assert not fetches.contents
    finish(s)


def test_no_reading_begins_while_much_is_held(
    s: TestedScheduler, fetches: Fetches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "MAX_BYTES", BLOCK_BYTES)
    gate(fetches).set()
    first, second = known(fetches, "a", 9, 1), known(fetches, "b", 9, 1)
    wait_until(lambda: s.resources.ready(first))
    assert not s.resources.ready(second)
    assert s.resources.ready(request("new", 3))
    s.resources.release(first)
    wait_until(lambda: s.resources.ready(second))


def test_images_from_disk_are_placed_before_tokens() -> None:
    s = scheduler()
    s.images.stored = {image(1, 4).key: np.zeros(4, np.uint8)}
    s.limits = FixedLimits(0, others=0)
    s.add(request("a", 8, images=[(image(1, 4), 0), (image(2, 4), 4)], bidirectional="all"))
    step = s.schedule()
    assert step.embeddings_to_place
    assert not step.requests
    assert step.has_work, "otherwise it would not run"
