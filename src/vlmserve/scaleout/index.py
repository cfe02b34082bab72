"""What a gateway believes each worker has cached: digests of prompts' segments and of images.

Each worker's digests are kept in the order of their last use and evicted when they are more tokens than the worker's
cache holds, as the worker itself evicts blocks. What it really has may differ, since other gateways send it requests as
well; `correct` shrinks or grows what is believed by what the worker says of each request.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from vlmserve.scaleout.keys import Segment

_SHRINK, _GROW = 0.9, 1.05
_LEAST_SHARE = 0.02
"""Of a worker's cache that is believed to be of use at all times."""


class WorkerCache:
    """What one worker is believed to have. To be changed by `CacheIndex` alone."""

    __slots__ = ("capacity", "entries", "limit", "most_entries", "tokens")

    def __init__(self, capacity: int, most_entries: int) -> None:
        self.capacity = self.limit = max(1, capacity)
        self.most_entries = max(1, most_entries)
        self.entries: OrderedDict[bytes, int] = OrderedDict()
        """Tokens by digest, the one used last at the end."""
        self.tokens = 0


class CacheIndex:
    """Bounded: at most `max_entries` digests, evenly for all workers. Workers are numbers that the caller chooses."""

    def __init__(self, max_entries: int = 2_000_000) -> None:
        self._max_entries = max_entries
        self.holders: dict[bytes, dict[int, None]] = {}
        self.caches: dict[int, WorkerCache] = {}
        self.lengths: dict[bytes, int] = {}

    def __len__(self) -> int:
        """Digests, counted once for each worker that has them."""
        return sum(len(cache.entries) for cache in self.caches.values())

    def add_worker(self, worker: int, capacity: int) -> None:
        """A worker with nothing cached. capacity: tokens of its KV cache."""
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
        """The worker's caches are empty: its engine was started again."""
        cache = self.caches.get(worker)
        if cache is None:
            return
        for digest in cache.entries:
            self._drop_holder(digest, worker)
        cache.entries.clear()
        cache.tokens = 0
        cache.limit = cache.capacity

    def insert(self, worker: int, segments: Sequence[Segment], images: Iterable[bytes] = ()) -> None:
        """A request with these segments goes to a worker, which will have them cached."""
        cache = self.caches.get(worker)
        if cache is None:
            return
        for image in images:
            self._touch(worker, cache, image, 0)
        # From the end on: the beginning of a prompt is used last, as the worker evicts its end first.
        for place in range(len(segments) - 1, -1, -1):
            digest, tokens = segments[place]
            self._touch(worker, cache, digest, tokens - (segments[place - 1].tokens if place else 0))
        self._evict(worker, cache)

    def insert_history(self, worker: int, digest: bytes, length: int, added: int) -> None:
        """A worker has the history of a stored response. length: its tokens. added: those of them that no request that
        was inserted has, which are the answer's."""
        if worker in self.caches:
            self.lengths[digest] = length
            self.insert_prompt(worker, digest, added)

    def insert_prompt(self, worker: int, digest: bytes, added: int, images: Iterable[bytes] = ()) -> None:
        """A worker has the prompt that ends with a segment of this digest, and its images. added: tokens of it that it
        did not have before."""
        if (cache := self.caches.get(worker)) is not None:
            for image in images:
                self._touch(worker, cache, image, 0)
            self._touch(worker, cache, digest, added)
            self._evict(worker, cache)

    def history_length(self, digest: bytes) -> int | None:
        """Tokens of a history that some worker is believed to have; None if none is."""
        return self.lengths.get(digest)

    def some_holders(self, digest: bytes, most: int, source: random.Random) -> Collection[int]:
        """Workers that are believed to have a digest; of many, some by chance."""
        holders = self.holders.get(digest, ())
        return holders if len(holders) <= most else source.sample(list(holders), most)

    def has(self, worker: int, digest: bytes) -> bool:
        return worker in self.holders.get(digest, ())

    def cached_tokens(self, worker: int, segments: Sequence[Segment]) -> int:
        """Tokens of the longest beginning of a prompt that a worker is believed to have."""
        cache = self.caches.get(worker)
        if cache is None:
            return 0
        entries = cache.entries
        for place in range(len(segments) - 1, -1, -1):
            if segments[place].digest in entries:
                return segments[place].tokens
        return 0

    def best(self, segments: Sequence[Segment], most: int, source: random.Random) -> dict[int, int]:
        """The workers that have the longest beginnings of a prompt, less than twice `most`, with their tokens of it."""
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
        """A worker has said which share of a prompt it had cached. Believing too much shrinks what is believed of it
        from now on, believing too little lets it grow back to the size of its cache."""
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
