"""The pool of state slots: working states of running requests, and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vlmserve.cache.blocks import BlockPool
from vlmserve.layer_specs import NO_SLOT
from vlmserve.steps import BlockCopy, Bytes, DiskEntry

SPARE_SHARE = 4
"""Spare checkpoints may take one in this many slots from others."""


def stored_key(key: bytes) -> bytes:
    """On disk, a state and the KV block that ends at the same token have different keys."""
    return key + b"state"


class Checkpoints:
    def __init__(self) -> None:
        # by key of full blocks: the extra tokens of each later checkpoint, by its key
        self._after: dict[bytes, dict[bytes, int]] = {}
        self._parents: dict[bytes, bytes] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._parents

    def after(self, parent: bytes) -> list[int]:
        return sorted({*self._after.get(parent, {}).values()}, reverse=True)

    def add(self, key: bytes, parent: bytes, extra: int) -> None:
        self._after.setdefault(parent, {})[key] = extra
        self._parents[key] = parent

    def drop(self, key: bytes) -> None:
        parent = self._parents.pop(key)
        del self._after[parent][key]
        if not self._after[parent]:
            del self._after[parent]


class StatePool:
    """Slots ``1 <= slot <= num_slots``; slot 0 is for padding.

    Unheld checkpoints are evicted to host memory, least recently used first. Spare checkpoints beyond a quarter of all
    slots are evicted before others.
    """

    def __init__(self, num_slots: int, num_host_slots: int = 0) -> None:
        self.num_slots, self.num_host_slots = num_slots, num_host_slots
        self.copies: list[BlockCopy] = []
        """Copies between slots that the next step begins with, in order."""
        self.contents: list[DiskEntry] = []
        """Read from disk, for the copies."""
        self.stored: Mapping[bytes, Bytes] = {}
        """Contents read from disk, by `stored_key`."""
        self.num_saved = self.num_loaded = 0
        self._slots = BlockPool(1 + num_slots, self._save)
        self._slots.allocate(1)
        self._host = BlockPool(num_host_slots, self._forget_on_host)
        self.checkpoints = Checkpoints()
        self._keys: dict[int, bytes] = {}
        # slots, oldest first
        self._spare: dict[int, None] = {}
        self._max_spare = num_slots // SPARE_SHARE
        self._num_replaced = 0

    @property
    def num_free(self) -> int:
        return self._slots.num_free

    @property
    def num_used(self) -> int:
        return self._slots.num_used - 1

    @property
    def num_cached(self) -> int:
        return self._slots.num_cached

    @property
    def num_on_host(self) -> int:
        return self._host.num_cached

    @property
    def num_evictions(self) -> int:
        return self._slots.num_evictions + self._num_replaced

    @property
    def spare_room(self) -> int:
        return max(self._max_spare, self.num_free - (self.num_cached - len(self._spare)))

    def begin(self, keys: Sequence[bytes], count: int) -> tuple[list[int], list[int]]:
        """Hold `count` working slots, and the checkpoints that they start from. Returns the slots of both.

        keys: one checkpoint per state; empty: zeros. If slots are scarce, states reuse their checkpoints' slots. Raises
        ValueError if too few are free.
        """
        sources = [NO_SLOT if (slot := self.get(key)) is None else slot for key in keys] or [NO_SLOT] * count
        on_host = [slot for key in keys if (slot := self._host.get(key)) is not None]
        unheld = [slot for slot in sources if slot != NO_SLOT and self._slots.ref_count(slot) == 0]
        # first, so that taking slots cannot evict them
        self._slots.share([slot for slot in sources if slot != NO_SLOT])
        self._host.share(on_host)
        reused = unheld[: max(0, count - self.num_free)]
        slots = []
        for number, source in enumerate(sources):
            slot = source if source in reused else self._take()
            if source in reused:
                self._save(slot, [keys[number]])
                self._slots.evict(slot)
                self._forget_slot(slot)
            elif source == NO_SLOT and keys:
                place = self._host.get(keys[number])
                assert place is not None
                self.copies.append(BlockCopy("load", place, slot))
                self.num_loaded += 1
                sources[number] = slot
            slots.append(slot)
        self._host.release(on_host)
        return slots, [slot for slot in sources if slot != NO_SLOT]

    def take(self, count: int, *, spare: bool = False) -> list[int]:
        """Return no slots if all are held, or too many are spare."""
        slots: list[int] = []
        while self.num_free >= count - len(slots) > 0:
            too_many = spare and len(self._spare) >= self._max_spare
            if too_many and not self._slots.has_unused and self._oldest_spare is None:
                break
            slots.append(self._take(spare=spare))
        if len(slots) < count:
            for slot in slots:
                self.release(slot)
            return []
        return slots

    @property
    def _oldest_spare(self) -> int | None:
        return next((slot for slot in self._spare if self._slots.ref_count(slot) == 0), None)

    def _take(self, *, spare: bool = False) -> int:
        if len(self._spare) + spare > self._max_spare and not self._slots.has_unused:
            oldest = self._oldest_spare
            if oldest is not None:
                self._slots.evict(oldest)
                self._num_replaced += 1
        [slot] = self._slots.allocate(1)
        self._forget_slot(slot)
        if spare:
            self._spare[slot] = None
        return slot

    def get(self, key: bytes) -> int | None:
        return self._slots.get(key)

    def evicted_at(self, key: bytes) -> float | None:
        """Seconds of `time.monotonic`."""
        times = [pool.evicted.get(key) for pool in (self._slots, self._host)]
        return max((one for one in times if one is not None), default=None)

    def release(self, slot: int, *, spare: bool = False) -> None:
        """spare: requests are unlikely to reuse the checkpoint. Raises ValueError for a free slot."""
        self._slots.release([slot])
        self._spare.pop(slot, None)
        if spare and slot in self._keys:
            self._spare[slot] = None

    def touch(self, key: bytes) -> None:
        if (slot := self.get(key)) is not None:
            self._slots.share([slot])
            self.release(slot)

    def register(self, slot: int, key: bytes, parent: bytes, extra: int) -> None:
        """parent: key of the full blocks before its `extra` tokens."""
        if self.get(key) is None:
            self._slots.register(slot, key)
            self._keys[slot] = key
            self.checkpoints.add(key, parent, extra)

    def forget(self, key: bytes) -> None:
        """Holders keep the slot."""
        if (copy := self._host.get(key)) is not None:
            self._host.unregister(copy)
        if (slot := self.get(key)) is not None:
            self._slots.unregister(slot)
            self._forget_slot(slot)
        elif copy is not None:
            self.checkpoints.drop(key)

    def _forget_slot(self, slot: int) -> None:
        self._spare.pop(slot, None)
        key = self._keys.pop(slot, None)
        if key is not None and key not in self._host:
            self.checkpoints.drop(key)

    def _save(self, slot: int, keys: list[bytes]) -> None:
        [key] = keys
        target = self._host.get(key)
        if target is not None:
            self._host.share([target])
        elif self._host.num_free:
            [target] = self._host.allocate(1)
            self._host.register(target, key)
            self.copies.append(BlockCopy("save", slot, target))
            self.num_saved += 1
        if target is not None:
            self._host.release([target])

    def _forget_on_host(self, slot: int, keys: list[bytes]) -> None:
        for key in keys:
            if self.get(key) is None:
                self.checkpoints.drop(key)


def restore(pool: StatePool, keys: Sequence[bytes], parents: Sequence[bytes], extra: int) -> None:
    """Make checkpoints of states that were read from disk, unless memory has them. parents, extra: see `register`.

    Raises ValueError if too few slots are free.
    """
    held = [slot for key in keys if (slot := pool.get(key)) is not None]
    on_host = [slot for key in keys if (slot := pool._host.get(key)) is not None]
    # first, so that taking slots cannot evict them
    pool._slots.share(held)
    pool._host.share(on_host)
    for key, parent in zip(keys, parents, strict=True):
        if pool.get(key) is None and key not in pool._host:
            slot = pool._take()
            pool.copies.append(BlockCopy("fill", len(pool.contents), slot))
            pool.contents.append(DiskEntry(stored_key(key), pool.stored[stored_key(key)]))
            pool.register(slot, key, parent, extra)
            held.append(slot)
    pool._slots.release(held)
    pool._host.release(on_host)
