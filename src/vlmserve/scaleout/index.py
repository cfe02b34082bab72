"""A gateway's estimate of each worker's cache: digests of prompt segments and of images.

Like blocks, the least recently used digests are evicted when their tokens exceed the KV cache. Other gateways use the
same caches, so `correct` follows reported hits.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from vlmserve.scaleout.keys import Segment

_SHRINK, _GROW = 0.9, 1.05
_LEAST_SHARE = 0.02
"""Minimum fraction of a worker's cache that the estimate covers."""


class WorkerCache:
    """Only `CacheIndex` changes it."""

    __slots__ = ("capacity", "entries", "limit", "most_entries", "tokens")

    def __init__(self, capacity: int, most_entries: int) -> None:
        self.capacity = self.limit = max(1, capacity)
        self.most_entries = max(1, most_entries)
        self.entries: OrderedDict[bytes, int] = OrderedDict()
        """Tokens by digest, most recently used last."""
        self.tokens = 0


class CacheIndex:
    """Estimates for all workers, together at most `max_entries` digests. The caller numbers the workers."""

    def __init__(self, max_entries: int = 2_000_000) -> None:
        self._max_entries = max_entries
        self.holders: dict[bytes, dict[int, None]] = {}
        self.caches: dict[int, WorkerCache] = {}
        self.lengths: dict[bytes, int] = {}

    def __len__(self) -> int:
        return sum(len(cache.entries) for cache in self.caches.values())

    def add_worker(self, worker: int, capacity: int) -> None:
        self.forget(worker)
        self.caches[worker] = WorkerCache(capacity, 1)
        share = max(1, self._max_entries // len(self.caches))
        for number, cache in self.caches.items():
            cache.most_entries = share
            self._evict(number, cache)

    def remove_worker(self, worker: int) -> None:
        self.forget(worker)
        self.caches.pop(worker, None)

    def forget(self, worker: int) -> None:
        cache = self.caches.get(worker)
        if cache is None:
            return
        for digest in cache.entries:
            self._drop_holder(digest, worker)
        cache.entries.clear()
        cache.tokens = 0
        cache.limit = cache.capacity

    def insert(self, worker: int, segments: Sequence[Segment], images: Iterable[bytes] = ()) -> None:
        cache = self.caches.get(worker)
        if cache is None:
            return
        for image in images:
            self._touch(worker, cache, image, 0)
        # Touch the start of the prompt last: the worker evicts its end first.
        for place in range(len(segments) - 1, -1, -1):
            digest, tokens = segments[place]
            self._touch(worker, cache, digest, tokens - (segments[place - 1].tokens if place else 0))
        self._evict(worker, cache)

    def insert_history(self, worker: int, digest: bytes, length: int, added: int) -> None:
        """length: tokens of the history. added: tokens of the answer."""
        if worker in self.caches:
            self.lengths[digest] = length
            self.insert_prompt(worker, digest, added)

    def insert_prompt(self, worker: int, digest: bytes, added: int, images: Iterable[bytes] = ()) -> None:
        """digest: the prompt's last. added: tokens that were not cached."""
        if (cache := self.caches.get(worker)) is not None:
            for image in images:
                self._touch(worker, cache, image, 0)
            self._touch(worker, cache, digest, added)
            self._evict(worker, cache)

    def some_holders(self, digest: bytes, most: int, source: random.Random) -> Collection[int]:
        """A random sample if more than `most` workers have the digest."""
        holders = self.holders.get(digest, ())
        return holders if len(holders) <= most else source.sample(list(holders), most)

    def has(self, worker: int, digest: bytes) -> bool:
        return worker in self.holders.get(digest, ())

    def cached_tokens(self, worker: int, segments: Sequence[Segment]) -> int:
        """Tokens of the longest prefix."""
        cache = self.caches.get(worker)
        if cache is None:
            return 0
        entries = cache.entries
        for place in range(len(segments) - 1, -1, -1):
            if segments[place].digest in entries:
                return segments[place].tokens
        return 0

    def best(self, segments: Sequence[Segment], most: int, source: random.Random) -> dict[int, int]:
        """Fewer than ``2 * most`` workers with the longest prefixes, and these prefixes' tokens."""
        found: dict[int, int] = {}
        holders = self.holders
        for digest, tokens in reversed(segments):
            if digest in holders:
                for worker in self.some_holders(digest, most, source):
                    found.setdefault(worker, tokens)
                if len(found) >= most:
                    break
        return found

    def correct(self, worker: int, believed: float, actual: float) -> None:
        """Shrink the estimate if `believed` was too high; grow it up to the cache's size if it was too low.

        believed, actual: cached fraction of a prompt.
        """
        cache = self.caches.get(worker)
        if cache is None:
            return
        if actual < believed - 0.1:
            cache.limit = max(int(cache.capacity * _LEAST_SHARE), int(cache.limit * _SHRINK), 1)
            self._evict(worker, cache)
        elif actual > believed + 0.1:
            cache.limit = min(cache.capacity, int(cache.limit * _GROW) + 1)

    def _touch(self, worker: int, cache: WorkerCache, digest: bytes, tokens: int) -> None:
        before = cache.entries.get(digest)
        if before is None:
            cache.entries[digest] = tokens
            cache.tokens += tokens
            self.holders.setdefault(digest, {})[worker] = None
        else:
            cache.entries.move_to_end(digest)

    def _evict(self, worker: int, cache: WorkerCache) -> None:
        while cache.entries and (cache.tokens > cache.limit or len(cache.entries) > cache.most_entries):
            digest, tokens = cache.entries.popitem(last=False)
            cache.tokens -= tokens
            self._drop_holder(digest, worker)

    def _drop_holder(self, digest: bytes, worker: int) -> None:
        holders = self.holders[digest]
        del holders[worker]
        if not holders:
            del self.holders[digest]
            self.lengths.pop(digest, None)
