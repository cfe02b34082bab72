"""Finds blocks of earlier requests on the device, and evicted blocks in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from vlmserve.cache.blocks import BlockPool
from vlmserve.steps import BlockCopy, Bytes, DiskEntry


class Place(NamedTuple):
    block: int
    on_host: bool
    entry: DiskEntry | None = None
    """Read from disk; has no block."""


class Hit(NamedTuple):
    """The cached blocks ``first <= i < end`` of a sequence.

    tail: a block that begins like the sequence's next, partly filled block, and is copied.
    """

    first: int = 0
    places: tuple[Place, ...] = ()
    tail: Place | None = None

    @property
    def end(self) -> int:
        return self.first + len(self.places)


class Column:
    """One of a request's block tables, see `CacheLayout`."""

    def __init__(self, number: int, window: int | None, block_size: int) -> None:
        """window: positions that a token attends to, including itself."""
        self.window, self.block_size = window, block_size
        self._suffix = number.to_bytes(2, "big") if number else b""

    def key(self, key: bytes) -> bytes:
        return key + self._suffix

    def first_visible(self, num_tokens: int) -> int:
        return 0 if self.window is None else max(0, num_tokens - self.window + 1) // self.block_size

    def first_needed(self, num_blocks: int) -> int:
        return self.first_visible(num_blocks * self.block_size)


class Chain(NamedTuple):
    keys: Sequence[bytes]
    """Keys of full blocks."""
    tail: bytes | None = None
    """Key of the partly filled block after them."""


class PrefixCache:
    """host: pool for evicted blocks. The runner executes `block_copies` before it writes to any block."""

    def __init__(
        self, pool: BlockPool, host: BlockPool | None = None, worth_saving: Callable[[], bool] = lambda: True
    ) -> None:
        self.pool = pool
        self.host = host
        self.block_copies: list[BlockCopy] = []
        self.block_contents: list[DiskEntry] = []
        self.stored: Mapping[bytes, Bytes] = {}
        self.num_saved = 0
        self.num_loaded = 0
        self._worth_saving = worth_saving
        if host is not None:
            pool.on_evict = self._save

    def find(self, chains: Sequence[Chain], columns: Sequence[Column]) -> tuple[list[Hit], int]:
        """Find the longest prefix of full blocks that all columns of all chains can reuse.

        Returns a hit per column and chain, and the blocks found without a window. All tails are found, or none.
        """
        tables = [(chain.keys, column) for chain in chains for column in columns]
        end = len(chains[0].keys)
        whole = [[] if column.window else self._find_first(keys[:end], column) for keys, column in tables]
        for places, (_, column) in zip(whole, tables, strict=True):
            end = end if column.window else min(end, len(places))
        reach = end if any(column.window is None for column in columns) else 0
        while (usable := next((n for one in tables if (n := self._usable(*one, end)) < end), end)) < end:
            end = usable
        hits = []
        for places, (keys, column) in zip(whole, tables, strict=True):
            first = column.first_needed(end)
            run = self._find_first(keys[first:end], column) if column.window else places[:end]
            hits.append(Hit(first, tuple(run)))
        if end == len(chains[0].keys):
            hits = self.with_tails(hits, [chain.tail for chain in chains], columns)
        return hits, max(reach, end)

    def with_tails(self, hits: list[Hit], tails: Iterable[bytes | None], columns: Sequence[Column]) -> list[Hit]:
        """Add partly filled blocks to the hits, or none unless all exist. tails: their keys, by chain."""
        places = [None if tail is None else self._place(column.key(tail)) for tail in tails for column in columns]
        if None in places:
            return hits
        return [hit._replace(tail=place) for hit, place in zip(hits, places, strict=True)]

    def _find_first(self, keys: Sequence[bytes], column: Column) -> list[Place]:
        places = []
        for key in keys:
            place = self._place(column.key(key))
            if place is None:
                break
            places.append(place)
        return places

    def _usable(self, keys: Sequence[bytes], column: Column, end: int) -> int:
        """Return `end` if all blocks that later tokens attend to exist, or the next smaller candidate."""
        if column.window is None:
            return end
        needed = range(end - 1, column.first_needed(end) - 1, -1)
        return next((number for number in needed if self._place(column.key(keys[number])) is None), end)

    def num_taken(self, hits: Sequence[Hit]) -> int:
        """Count free device blocks that hits take, without tails."""
        places = [place for hit in hits for place in hit.places]
        places += [hit.tail for hit in hits if hit.tail is not None and not hit.tail.on_host]
        return sum(place.on_host or self.pool.ref_count(place.block) == 0 for place in places)

    def take(self, hits: Sequence[Hit], keys: Sequence[Sequence[bytes]], num_new: Sequence[int]) -> list[list[int]]:
        """Take each hit's blocks, and `num_new` more, the first for the tail's copy.

        keys: of each hit's blocks. Raises ValueError if too few blocks are free.
        """
        kept = [place for hit in hits for place in (*hit.places, hit.tail) if place is not None]
        on_host = [place.block for place in kept if place.on_host and place.entry is None]
        # first, so that the allocation cannot evict them
        self.pool.share([place.block for place in kept if not place.on_host])
        if self.host is not None:
            self.host.share(on_host)
        tables = [self._fill(*one) for one in zip(hits, keys, num_new, strict=True)]
        if self.host is not None:
            self.host.release(on_host)
        return tables

    def evicted_at(self, key: bytes) -> float | None:
        """Seconds of `time.monotonic`."""
        own, on_host = self.pool.evicted.get(key), None if self.host is None else self.host.evicted.get(key)
        return own if on_host is None else on_host if own is None else max(own, on_host)

    def forget(self, key: bytes) -> int | None:
        """Returns the device block."""
        if self.host is not None and (copy := self.host.get(key)) is not None:
            self.host.unregister(copy)
        block = self.pool.get(key)
        if block is not None:
            self.pool.unregister(block)
        return block

    def _fill(self, hit: Hit, keys: Sequence[bytes], num_new: int) -> list[int]:
        fresh = self.pool.allocate(num_new + sum(place.on_host for place in hit.places))
        blocks = []
        for place, key in zip(hit.places, keys, strict=True):
            if place.on_host:
                block = fresh.pop(0)
                self._load(place, block)
                self.pool.register(block, key)
            else:
                block = place.block
            blocks.append(block)
        if hit.tail is not None:
            if hit.tail.on_host:
                self._load(hit.tail, fresh[0])
            else:
                self.block_copies.append(BlockCopy("copy", hit.tail.block, fresh[0]))
                self.pool.release([hit.tail.block])
        return blocks + fresh

    def _place(self, key: bytes) -> Place | None:
        if (block := self.pool.get(key)) is not None:
            return Place(block, on_host=False)
        if self.host is not None and (block := self.host.get(key)) is not None:
            return Place(block, on_host=True)
        content = self.stored.get(key)
        return None if content is None else Place(-1, on_host=True, entry=DiskEntry(key, content))

    def _load(self, source: Place, target: int) -> None:
        if source.entry is not None:
            self.block_copies.append(BlockCopy("fill", len(self.block_contents), target))
            self.block_contents.append(source.entry)
            return
        self.block_copies.append(BlockCopy("load", source.block, target))
        self.num_loaded += 1

    def _save(self, block: int, keys: list[bytes]) -> None:
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
        block = host.get(key)
        assert block is not None
        host.share([block])
        host.release([block])
