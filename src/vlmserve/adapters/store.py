"""The served adapters, by name; host memory caches them by digest, within a budget.

The store reads files in its own thread, so loading does not block steps. It reads an evicted adapter again when a
request needs it.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from vlmserve.adapters.checkpoint import AdapterCheckpoint
from vlmserve.adapters.lora import Adapter, read_adapter
from vlmserve.errors import AdapterError, UnknownModelError
from vlmserve.models.adaptable import AdaptableModel
from vlmserve.types import AdapterInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Served:
    name: str
    folder: Path
    digest: bytes
    num_bytes: int
    rank: int
    vision: bool
    """True if it changes image embeddings."""
    mixes: tuple[str, ...]
    """Names of the adapters that X-LoRA mixes."""
    pool: Mapping[str, str]
    """See `read_xlora`."""


class AdapterStore:
    """If a name gets a new adapter, earlier requests keep the old one. Only reading files runs in another thread."""

    def __init__(
        self,
        model: AdaptableModel,
        *,
        max_rank: int,
        max_loaded: int = 64,
        max_bytes: int = 2**31,
    ) -> None:
        self.model, self._max_rank = model, max_rank
        self._max_loaded, self._max_bytes = max_loaded, max_bytes
        self.is_needed: Callable[[bytes], bool] = lambda digest: False
        """Returns whether unfinished requests use a digest. Their adapters stay in memory even after they are unloaded.
        """
        self.is_pending: Callable[[bytes], bool] = lambda digest: False
        """Returns whether the next step to run takes a digest from memory."""
        self._served: dict[str, Served] = {}
        self._memory: OrderedDict[bytes, Adapter] = OrderedDict()
        self._reader = ThreadPoolExecutor(1, "read-adapters")
        self._reading: dict[bytes, Future[Adapter]] = {}
        self._orphans: set[bytes] = set()
        self._changed = threading.Event()
        # Digests that waiting requests asked for, in the current and in the previous planned step.
        self._wanted: tuple[set[bytes], set[bytes]] = set(), set()
        self.failures: dict[bytes, str] = {}
        """Why an adapter that requests wait for cannot be read again, by digest."""
        self.num_loads = self.num_evictions = 0

    def read(self, folder: Path, pool: Mapping[str, str] | None = None) -> Future[Adapter]:
        """Start to read an adapter for `serve`. pool: see `read_xlora`. The future raises AdapterError."""
        future = self._reader.submit(self._read, folder, pool or {})
        future.add_done_callback(lambda _: self._changed.set())
        return future

    def serve(self, name: str, folder: Path, adapter: Adapter) -> Served:
        """Replace the adapter of this name. Raises AdapterError if it exceeds the budget."""
        if adapter.num_bytes > self._max_bytes:
            raise AdapterError(
                f"{name} takes {adapter.num_bytes:,} bytes, and all adapters together may take {self._max_bytes:,}; "
                "--lora-memory sets how much"
            )
        vision, digest = adapter.vision, adapter.digest
        mixes = () if adapter.mixture is None else adapter.mixture.config.names
        before = self._served.get(name)
        self._served[name] = served = Served(
            name, folder, digest, adapter.num_bytes, adapter.max_rank, vision, mixes, adapter.pool
        )
        self.failures.pop(digest, None)
        self._keep(adapter)
        if before is not None:
            self._orphans.add(before.digest)
            self.drop_orphans()
        logger.info("adapter %s: rank %d, %d bytes, %s", name, served.rank, served.num_bytes, digest.hex()[:12])
        return served

    def load(self, name: str, folder: Path, pool: Mapping[str, str] | None = None) -> Served:
        """On AdapterError nothing changes."""
        return self.serve(name, folder, self.read(folder, pool).result())

    def unload(self, name: str) -> None:
        """Raises UnknownModelError."""
        self._orphans.add(self._served.pop(self[name].name).digest)
        self.drop_orphans()

    @property
    def names(self) -> list[str]:
        return sorted(self._served)

    @property
    def infos(self) -> list[AdapterInfo]:
        return [
            AdapterInfo(
                one.name, str(one.folder), one.digest.hex(), one.rank, one.num_bytes, one.vision, list(one.mixes)
            )
            for one in self._served.values()
        ]

    @property
    def num_served(self) -> int:
        return len(self._served)

    @property
    def num_loaded(self) -> int:
        return len(self._memory)

    @property
    def used_bytes(self) -> int:
        return sum(adapter.num_bytes for adapter in self._memory.values())

    def __getitem__(self, name: str) -> Served:
        if name not in self._served:
            raise UnknownModelError(f"there is no adapter {name!r:.100} here", param="model")
        return self._served[name]

    def get(self, digest: bytes) -> Adapter:
        self._memory.move_to_end(digest)
        return self._memory[digest]

    def begin_step(self) -> None:
        """Take up adapters that were read meanwhile."""
        self._wanted = set(), self._wanted[0]
        self._changed.clear()
        for digest, reading in [*self._reading.items()]:
            if reading.done():
                del self._reading[digest]
                self._finish(digest, reading)

    def is_loaded(self, digest: bytes) -> bool:
        """Starts to read an absent adapter if there is room."""
        self._wanted[0].add(digest)
        if digest in self._memory:
            return True
        if digest not in self._reading and digest not in self.failures:
            served = next((one for one in self._served.values() if one.digest == digest), None)
            if served is None:
                self.failures[digest] = "the adapter was unloaded, or replaced, before the request could run"
            elif self._has_room(served.num_bytes):
                self._reading[digest] = self.read(served.folder, served.pool)
        return False

    def wait(self, seconds: float) -> bool:
        """Returns False at once if none is being read."""
        if not self._reading:
            return False
        self._changed.wait(seconds)
        return True

    def drop_orphans(self) -> None:
        """Drop adapters that nobody serves or uses."""
        if not self._orphans:
            return
        self._orphans = {digest for digest in self._orphans if not self._is_served(digest)}
        for digest in [digest for digest in self._orphans if not self.is_needed(digest)]:
            self._orphans.remove(digest)
            self._memory.pop(digest, None)

    def take_failures(self) -> dict[bytes, str]:
        """Clear `failures`, so that the next request tries again."""
        failures, self.failures = self.failures, {}
        return failures

    def _read(self, folder: Path, pool: Mapping[str, str]) -> Adapter:
        if pool:
            raise AdapterError(f"{folder} is no X-LoRA checkpoint, so there is nothing that it mixes")
        with torch.inference_mode():
            return read_adapter(AdapterCheckpoint(folder), self.model, max_rank=self._max_rank)

    def _finish(self, digest: bytes, reading: Future[Adapter]) -> None:
        try:
            adapter = reading.result()
        except AdapterError as error:
            self.failures[digest] = f"the adapter cannot be read again: {error}"
            return
        if adapter.digest != digest:
            self.failures[digest] = "the adapter's files have changed since it was loaded; load it again"
            return
        self._keep(adapter)

    def _keep(self, adapter: Adapter) -> None:
        self.num_loads += adapter.digest not in self._memory
        self._memory[adapter.digest] = adapter
        self._memory.move_to_end(adapter.digest)
        for digest in [digest for digest in self._memory if digest != adapter.digest]:
            if not self._over(0, 0):
                break
            if not self._is_held(digest):
                del self._memory[digest]
                self.num_evictions += 1

    def _over(self, count: int, num_bytes: int) -> bool:
        return len(self._memory) + count > self._max_loaded or self.used_bytes + num_bytes > self._max_bytes

    def _has_room(self, num_bytes: int) -> bool:
        held = [adapter for digest, adapter in self._memory.items() if self._is_held(digest)]
        reading = [one for one in self._served.values() if one.digest in self._reading]
        used = sum(adapter.num_bytes for adapter in held) + sum(one.num_bytes for one in reading)
        return len(held) + len(self._reading) < self._max_loaded and used + num_bytes <= self._max_bytes

    def _is_held(self, digest: bytes) -> bool:
        """True for an adapter that a waiting request asked for or could not get again."""
        if any(digest in wanted for wanted in self._wanted):
            return True
        return self.is_pending(digest) or (not self._is_served(digest) and self.is_needed(digest))

    def _is_served(self, digest: bytes) -> bool:
        return any(one.digest == digest for one in self._served.values())
