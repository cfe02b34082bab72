"""Reads disk entries in threads, ahead of the requests that need them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from vlmserve.cache.tiers import DiskTier
from vlmserve.memory import huge_pages
from vlmserve.steps import Bytes, ModelRunnerOutput, SchedulerOutput

NUM_READERS = 2
MAX_BYTES = 512 * 2**20
"""Maximum bytes that one request reads. No read begins while requests hold this much."""
SHARED_BYTES = 2**20
"""Two threads read a request's entries of at least this many bytes."""
_BUFFER_BYTES = 32 * 2**20
_SMALL_BYTES = 2**18

Read = Callable[[Sequence[bytes], int], int]
"""Reads entries by keys and size until one is missing or too much was read. Returns the number read."""


class Plan(NamedTuple):
    run: Callable[[Read], None]
    """Reads in a thread."""
    whole: frozenset[bytes] = frozenset()
    """Keys of entries that are not sharded, so rank 0 alone reads them."""


class Buffers:
    """Cuts buffers from huge pages: faults of small pages take longer than reading."""

    def __init__(self) -> None:
        self._rest: Bytes = np.empty(0, np.uint8)
        self._lock = threading.Lock()

    def take(self, size: int) -> Bytes:
        if size < _SMALL_BYTES:
            return np.empty(size, np.uint8)
        with self._lock:
            if len(self._rest) < size:
                self._rest = np.frombuffer(huge_pages(max(size, _BUFFER_BYTES)), np.uint8)
            taken, self._rest = self._rest[:size], self._rest[size:]
        return taken


class Reading:
    def __init__(self, tier: DiskTier, known: Mapping[bytes, Bytes], helpers: ThreadPoolExecutor) -> None:
        self.found: dict[bytes, Bytes] = {}
        self._tier, self._known, self._helpers = tier, known, helpers
        self._buffers = Buffers()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def read(self, keys: Sequence[bytes], size: int) -> int:
        """See `Read`. Two threads take keys in turn."""
        left = enumerate(keys)
        missing = [len(keys)]
        if len(keys) * size >= SHARED_BYTES:
            helper = self._helpers.submit(self._read_some, left, size, missing)
            self._read_some(left, size, missing)
            if not helper.cancel():
                helper.result()
        else:
            self._read_some(left, size, missing)
        return min(missing)

    def _read_some(self, left: Iterator[tuple[int, bytes]], size: int, missing: list[int]) -> None:
        while len(missing) == 1:
            with self._lock:
                number, key = next(left, (0, None))
                if key is None:
                    return
                fits = key in self.found or self._num_bytes + size <= MAX_BYTES
                self._num_bytes += size * (fits and key not in self.found)
            if not fits or not self._read_one(key, size):
                missing.append(number)

    def _read_one(self, key: bytes, size: int) -> bool:
        if key not in self.found:
            content = self._known.get(key)
            if content is None:
                content = self._tier.read(key, size, self._buffers.take)
            if content is None:
                return False
            self.found[key] = content
        return True


class Fetches:
    """contents: completely read entries that requests hold."""

    def __init__(self, tier: DiskTier) -> None:
        self.tier = tier
        self._contents: dict[bytes, Bytes] = {}
        self._num_bytes = 0
        self._holders: dict[bytes, set[str]] = {}
        self._keys: dict[str, list[bytes]] = {}
        self._running: dict[str, Future[dict[bytes, Bytes]]] = {}
        self._readers = ThreadPoolExecutor(NUM_READERS, "disk-reader")
        self._helpers = ThreadPoolExecutor(NUM_READERS, "disk-helper")
        self._ended = threading.Condition()

    @property
    def contents(self) -> Mapping[bytes, Bytes]:
        return self._contents

    @property
    def may_begin(self) -> bool:
        return self._num_bytes < MAX_BYTES and len(self._running) < NUM_READERS

    def begin(self, owner: str, plan: Plan) -> None:
        self._running[owner] = reading = self._readers.submit(self._run, plan.run)
        reading.add_done_callback(self._notify)

    def is_done(self, owner: str) -> bool:
        """Move a request's entries to `contents` once all are read."""
        reading = self._running.get(owner)
        if reading is None:
            return True
        if not reading.done():
            return False
        del self._running[owner]
        self._add(owner, reading.result())
        return True

    def _add(self, owner: str, found: Mapping[bytes, Bytes]) -> None:
        self._keys[owner] = [*found]
        for key, content in found.items():
            if key not in self._contents:
                self._contents[key] = content
                self._num_bytes += len(content)
            self._holders.setdefault(key, set()).add(owner)

    def release(self, owner: str) -> None:
        if (reading := self._running.pop(owner, None)) is not None:
            reading.cancel()
        self.keep(owner, ())

    def keep(self, owner: str, needed: Container[bytes]) -> None:
        held = self._keys.pop(owner, [])
        for key in held:
            if key in needed:
                continue
            holders = self._holders[key]
            holders.remove(owner)
            if not holders:
                self._num_bytes -= len(self._contents[key])
                del self._holders[key], self._contents[key]
        if kept := [key for key in held if key in needed]:
            self._keys[owner] = kept

    def end_step(self, step: SchedulerOutput) -> None:
        """Add what other ranks read."""

    def ran(self, output: ModelRunnerOutput) -> None:
        """Note what other ranks have read."""

    def wait(self, seconds: float) -> bool:
        """Return False immediately if nothing is being read."""
        if not self._running:
            return False
        with self._ended:
            return self._ended.wait_for(lambda: any(one.done() for one in self._running.values()), seconds)

    def _notify(self, _: Future[dict[bytes, Bytes]]) -> None:
        with self._ended:
            self._ended.notify_all()

    def _run(self, run: Callable[[Read], None]) -> dict[bytes, Bytes]:
        reading = Reading(self.tier, self._contents, self._helpers)
        run(reading.read)
        return reading.found
