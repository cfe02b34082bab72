"""The pool of state slots: working states of running requests, and checkpoints that are found by their content.

Checkpoints that no step needs are evicted when a slot is needed, the least recently used first. Spare ones, which are
less likely to be found, take unused slots and a quarter of all. Beyond this share they are evicted first.
"""

from __future__ import annotations

from vlmserve.cache.blocks import BlockPool

SPARE_SHARE = 4
"""One of this many slots may have a spare checkpoint in place of another checkpoint."""


class StatePool:
    """Slots ``1 <= slot <= num_slots``. Slot 0 pads batches and is never given away.

    A slot is held while it has a working state, or while a step writes or reads its checkpoint.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots = BlockPool(1 + num_slots)
        self._slots.allocate(1)
        # By the key of full blocks, the checkpoints after them: how many more tokens each has seen, by its key.
        self._extras: dict[bytes, dict[bytes, int]] = {}
        self._parents: dict[bytes, bytes] = {}
        self._keys: dict[int, bytes] = {}
        # Slots of spare checkpoints, the oldest first.
        self._spare: dict[int, None] = {}
        self._max_spare = num_slots // SPARE_SHARE
        self._num_replaced = 0

    @property
    def num_free(self) -> int:
        """Slots that can be taken: unused ones, and checkpoints that nobody holds."""
        return self._slots.num_free

    @property
    def num_used(self) -> int:
        """Slots that are held."""
        return self._slots.num_used - 1

    @property
    def num_cached(self) -> int:
        """Checkpoints."""
        return self._slots.num_cached

    @property
    def num_evictions(self) -> int:
        return self._slots.num_evictions + self._num_replaced

    @property
    def spare_room(self) -> int:
        """Spare checkpoints that fit without evicting others, or their share if that is more."""
        return max(self._max_spare, self.num_free - (self.num_cached - len(self._spare)))

    def take(self, *, spare: bool = False) -> int | None:
        """Hold a slot for another state. None: all are held, or there are too many spare checkpoints for one more."""
        if not self._slots.num_free:
            return None
        if len(self._spare) + spare > self._max_spare and not self._slots.has_unused:
            oldest = next((slot for slot in self._spare if self._slots.ref_count(slot) == 0), None)
            if oldest is not None:
                self._slots.unregister(oldest)
                self._num_replaced += 1
            elif spare:
                return None
        [slot] = self._slots.allocate(1)
        self._forget_slot(slot)
        if spare:
            self._spare[slot] = None
        return slot

    def get(self, key: bytes) -> int | None:
        """Return the slot of a checkpoint, without holding it."""
        return self._slots.get(key)

    def is_held(self, slot: int) -> bool:
        return self._slots.ref_count(slot) > 0

    def hold(self, slot: int) -> None:
        """Hold a checkpoint. It needs one `release` for each call."""
        self._slots.share([slot])

    def release(self, slot: int, *, spare: bool = False) -> None:
        """Stop holding a slot. A checkpoint becomes the one that is evicted last, of spare ones or of all others.

        spare: a request is unlikely to find the checkpoint useful. Raises ValueError for a free slot.
        """
        self._slots.release([slot])
        self._spare.pop(slot, None)
        if spare and slot in self._keys:
            self._spare[slot] = None

    def touch(self, key: bytes) -> None:
        """Make a checkpoint, if it exists, the one that is evicted last."""
        if (slot := self.get(key)) is not None:
            self.hold(slot)
            self.release(slot)

    def register(self, slot: int, key: bytes, parent: bytes, extra: int) -> None:
        """Make a held slot a checkpoint, unless another one has this key.

        parent: key of the sequence's full blocks. extra: tokens after them.
        """
        if self.get(key) is None:
            self._slots.register(slot, key)
            self._extras.setdefault(parent, {})[key] = extra
            self._parents[key], self._keys[slot] = parent, key

    def extras(self, parent: bytes) -> list[int]:
        """Return how many tokens after these full blocks checkpoints have seen, the largest number first."""
        return sorted({*self._extras.get(parent, {}).values()}, reverse=True)

    def forget(self, key: bytes) -> None:
        """Drop a checkpoint if it exists. Who holds its slot keeps it."""
        if (slot := self.get(key)) is not None:
            self._slots.unregister(slot)
            self._forget_slot(slot)

    def _forget_slot(self, slot: int) -> None:
        self._spare.pop(slot, None)
        key = self._keys.pop(slot, None)
        if key is None:
            return
        parent = self._parents.pop(key)
        del self._extras[parent][key]
        if not self._extras[parent]:
            del self._extras[parent]
