"""Says why the prefix cache lacked tokens of a prompt."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from vlmserve.cache.prefix import Column, PrefixCache
from vlmserve.scheduler.request import Request
from vlmserve.types import Missed

MissReason = Literal["never_seen", "evicted", "no_checkpoint"]


class Lost(NamedTuple):
    """Leading tokens whose checkpoint was evicted, and when."""

    num_tokens: int
    evicted_at: float | None = None


class Misses:
    beyond_checkpoints: MissReason = "evicted"
    """Why a prompt cannot reuse blocks that are cached."""

    def __init__(self, cache: PrefixCache, columns: Sequence[Column], block_size: int) -> None:
        self.total = Missed()
        self._cache, self._columns, self._size = cache, columns, block_size

    def note(self, request: Request, reusable: int, reach: int) -> Missed:
        """reusable: leading tokens that a cache may provide. reach: cached full blocks, also unusable ones."""
        cached = request.num_cached or 0
        reusable = max(cached, min(reusable, request.num_prompt_tokens))
        counts: dict[MissReason, int] = {"never_seen": 0, "evicted": 0, "no_checkpoint": 0}
        first_eviction: float | None = None
        lost = self._lost_checkpoint(request, cached, min(reach * self._size, reusable))
        for key, start, end in self._missing(request, cached, reusable):
            evicted_at = lost.evicted_at if start < lost.num_tokens else self._evicted_at(key)
            if evicted_at is None:
                reason = self.beyond_checkpoints if end <= reach * self._size else "never_seen"
            else:
                reason, first_eviction = "evicted", first_eviction or evicted_at
            counts[reason] += end - start
        age = None if first_eviction is None else time.monotonic() - first_eviction
        missed = Missed(**counts, not_cacheable=request.num_prompt_tokens - reusable, seconds_since_eviction=age)
        self.total += missed
        return missed

    def _missing(self, request: Request, cached: int, reusable: int) -> Iterator[tuple[bytes, int, int]]:
        """Yield key, first token and end of each block."""
        chain, size = request.chains[0], self._size
        keys = request.keys_of_full_blocks(chain, reusable // size, size)
        for index in range(cached // size, len(keys)):
            yield keys[index], max(cached, index * size), (index + 1) * size
        tail = request.tail_key(chain, reusable, size)
        if tail is not None and cached < reusable:
            yield tail, max(cached, len(keys) * size), reusable

    def _evicted_at(self, key: bytes) -> float | None:
        latest: float | None = None  # a plain loop: long prompts have thousands of blocks
        for column in self._columns:
            evicted_at = self._cache.evicted_at(column.key(key))
            if evicted_at is not None and (latest is None or evicted_at > latest):
                latest = evicted_at
        return latest

    def _lost_checkpoint(self, request: Request, start: int, end: int) -> Lost:
        """The last evicted checkpoint within ``start < tokens <= end``."""
        return Lost(start)
