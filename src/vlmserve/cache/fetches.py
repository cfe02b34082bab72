"""Reads disk entries in threads, ahead of the requests that need them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from vlmserve.cache.tiers import DiskTier
from vlmserve.steps import Bytes

NUM_READERS = 2
MAX_BYTES = 512 * 2**20
"""Maximum bytes that one request reads. No read begins while requests hold this much."""

Read = Callable[[bytes, int], bool]
"""Reads an entry by key and size. Returns False if it does not exist, or too much was read."""


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
        self._ended = threading.Condition()

    @property
    def contents(self) -> Mapping[bytes, Bytes]:
        return self._contents

    @property
    def may_begin(self) -> bool:
        return self._num_bytes < MAX_BYTES and len(self._running) < NUM_READERS

    def begin(self, owner: str, plan: Callable[[Read], None]) -> None:
        self._running[owner] = reading = self._readers.submit(self._run, plan)
        reading.add_done_callback(self._notify)

    def is_done(self, owner: str) -> bool:
        """Move a request's entries to `contents` once all are read."""
        reading = self._running.get(owner)
        if reading is None:
            return True
        if not reading.done():
            return False
        del self._running[owner]
        found = reading.result()
        self._keys[owner] = [*found]
        for key, content in found.items():
            if key not in self._contents:
                self._contents[key] = content
                self._num_bytes += len(content)
            self._holders.setdefault(key, set()).add(owner)
        return True

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

    def wait(self, seconds: float) -> bool:
        """Return False immediately if nothing is being read."""
        if not self._running:
            return False
        with self._ended:
            return self._ended.wait_for(lambda: any(one.done() for one in self._running.values()), seconds)

    def _notify(self, _: Future[dict[bytes, Bytes]]) -> None:
        with self._ended:
            self._ended.notify_all()

    def _run(self, plan: Callable[[Read], None]) -> dict[bytes, Bytes]:
        found: dict[bytes, Bytes] = {}
        plan(partial(self._read, found))
        return found

    def _read(self, found: dict[bytes, Bytes], key: bytes, size: int) -> bool:
        if key in found:
            return True
        if sum(map(len, found.values())) + size > MAX_BYTES:
            return False
        content = self._contents.get(key)
        if content is None:
            content = self.tier.read(key, size)
        if content is not None:
            found[key] = content
        return content is not None
