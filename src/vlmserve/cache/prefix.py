"""The prefix cache: blocks of earlier requests on the device, and evicted ones in host memory.

Everything here is bookkeeping. What has to be copied is listed in `PrefixCache.block_copies`, in order; the runner
copies it before it writes to any block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from vlmserve.cache.blocks import BlockPool
from vlmserve.steps import BlockCopy


class Place(NamedTuple):
    """Where a block's content is."""

    block: int
    on_host: bool


class Hit(NamedTuple):
    """The cached blocks of a sequence, from number `first` on, up to but not including number `end`.

    tail: a block that begins with the same tokens as the sequence's next, partly filled one; it will be copied, since
    the sequence writes its next tokens after them.
    """

    first: int = 0
    places: tuple[Place, ...] = ()
    tail: Place | None = None

    @property
    def end(self) -> int:
        return self.first + len(self.places)


class PrefixCache:
    """Finds blocks by their keys. host: a second pool, for what the first one evicts.

    worth_saving: asked before a block goes to the host; see `CostModel`.
    """

    def __init__(
        self, pool: BlockPool, host: BlockPool | None = None, worth_saving: Callable[[], bool] = lambda: True
    ) -> None:
        self.pool = pool
        self.host = host
        self.block_copies: list[BlockCopy] = []
        self.num_saved = 0
        self.num_loaded = 0
        self._worth_saving = worth_saving
        if host is not None:
            pool.on_evict = self._save

    def find(
        self, chains: Sequence[Sequence[bytes]], tail_keys: Sequence[bytes | None], first_visible: Callable[[int], int]
    ) -> list[Hit]:
        """Return the longest run of cached blocks that is usable in all chains, for each of them.

        chains: keys of the full blocks of the same tokens. tail_keys: for each chain, the key of the partly filled
        block after them, if there is one. Tails are found in all chains or in none. first_visible: from a number of
        leading blocks to the first one that later tokens attend to.
        """
        rows: list[list[Place] | None] = []
        for keys in zip(*chains, strict=True):
            places = [place for key in keys if (place := self._place(key)) is not None]
            if len(places) < len(keys) and first_visible(len(chains[0])) == 0:
                break
            rows.append(places if len(places) == len(keys) else None)
        end, first = _longest(rows, first_visible)
        tails = [None if key is None or end < len(chains[0]) else self._place(key) for key in tail_keys]
        if None in tails:
            tails = [None] * len(chains)
        run = [row for row in rows[first:end] if row is not None]
        return [Hit(first, tuple(row[number] for row in run), tail) for number, tail in enumerate(tails)]

    def num_taken(self, hit: Hit) -> int:
        """How many free device blocks it takes to use a hit; its tail is held only until its copy is scheduled."""
        places = hit.places if hit.tail is None or hit.tail.on_host else (*hit.places, hit.tail)
        return sum(place.on_host or self.pool.ref_count(place.block) == 0 for place in places)

    def take(self, hits: Sequence[Hit], chains: Sequence[Sequence[bytes]], num_new: int) -> list[list[int]]:
        """For each chain, take the blocks of its hit and `num_new` further ones. The first of these gets the tail's
        content. Raises ValueError if too few blocks are free."""
        kept = [place for hit in hits for place in (*hit.places, hit.tail) if place is not None]
        on_host = [place.block for place in kept if place.on_host]
        # Shared first, so that the allocation does not evict what is about to be used.
        self.pool.share([place.block for place in kept if not place.on_host])
        if self.host is not None:
            self.host.share(on_host)
        tables = [self._fill(hit, keys, num_new) for hit, keys in zip(hits, chains, strict=True)]
        if self.host is not None:
            self.host.release(on_host)
        return tables

    def _fill(self, hit: Hit, keys: Sequence[bytes], num_new: int) -> list[int]:
        """The blocks of a hit that are shared already, and new ones."""
        fresh = self.pool.allocate(num_new + sum(place.on_host for place in hit.places))
        blocks = []
        for number, place in enumerate(hit.places, start=hit.first):
            if place.on_host:
                block = fresh.pop(0)
                self._load(place.block, block)
                self.pool.register(block, keys[number])
            else:
                block = place.block
            blocks.append(block)
        if hit.tail is not None:
            if hit.tail.on_host:
                self._load(hit.tail.block, fresh[0])
            else:
                self.block_copies.append(BlockCopy("copy", hit.tail.block, fresh[0]))
                self.pool.release([hit.tail.block])
        return blocks + fresh

    def _place(self, key: bytes) -> Place | None:
        if (block := self.pool.get(key)) is not None:
            return Place(block, on_host=False)
        if self.host is not None and (block := self.host.get(key)) is not None:
            return Place(block, on_host=True)
        return None

    def _load(self, source: int, target: int) -> None:
        self.block_copies.append(BlockCopy("load", source, target))
        self.num_loaded += 1

    def _save(self, block: int, keys: list[bytes]) -> None:
        """Keep an evicted block's content on the host unless it is there."""
        host = self.host
        assert host is not None
        unknown = [key for key in keys if key not in host]
        if not unknown:
            for key in keys:
                self._touch(host, key)
            return
        if host.num_free == 0 or not self._worth_saving():
            return
        (target,) = host.allocate(1)
        for key in unknown:
            host.register(target, key)
        host.release([target])
        self.block_copies.append(BlockCopy("save", block, target))
        self.num_saved += 1

    @staticmethod
    def _touch(host: BlockPool, key: bytes) -> None:
        """Make a block on the host the one that is evicted last."""
        block = host.get(key)
        assert block is not None
        host.share([block])
        host.release([block])


def _longest(places: Sequence[object | None], first_visible: Callable[[int], int]) -> tuple[int, int]:
    """The end and the beginning of the longest run of blocks that has all blocks that later tokens attend to."""
    known = 0
    best = (0, 0)
    for index, place in enumerate(places):
        known = known + 1 if place is not None else 0
        end = index + 1
        first = first_visible(end)
        if known >= end - first and known:
            best = (end, first)
    return best
