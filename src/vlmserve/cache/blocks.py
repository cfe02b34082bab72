"""The pool of KV blocks: ref counts and lookup by content keys."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np

from vlmserve.cache.evicted import EvictedKeys
from vlmserve.types import BlockMap


def _ignore_eviction(block: int, keys: list[bytes]) -> None: ...


class BlockPool:
    """Ref-counted block ids ``0 <= id < num_blocks`` with 32-byte content keys.

    Reuses free blocks without a key first, then unwanted ones, then the least recently released. on_evict: called with
    a block and its keys, unless unwanted.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int, list[bytes]], None] = _ignore_eviction) -> None:
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self.evicted = EvictedKeys()
        self.on_evict = on_evict
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._unwanted: OrderedDict[int, None] = OrderedDict()
        self._ref_counts = array("i", bytes(4 * num_blocks))
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, list[bytes]] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._unwanted)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        return len(self._keys)

    @property
    def has_unused(self) -> bool:
        return bool(self._free) and next(iter(self._free)) not in self._keys

    def draw_map(self, max_cells: int) -> BlockMap:
        per_cell = max(1, -(-self.num_blocks // max_cells))
        ref_counts = np.frombuffer(self._ref_counts, dtype=np.intc)
        known = np.zeros(self.num_blocks, dtype=bool)
        known[np.fromiter(self._keys, dtype=np.int64, count=len(self._keys))] = True
        starts = np.arange(0, self.num_blocks, per_cell)
        return BlockMap(
            self.num_blocks,
            per_cell,
            np.add.reduceat(ref_counts > 0, starts, dtype=np.int64).tolist(),
            np.add.reduceat(known & (ref_counts == 0), starts, dtype=np.int64).tolist(),
            np.maximum.reduceat(ref_counts, starts).tolist(),
        )

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def allocate(self, count: int) -> list[int]:
        """Raises ValueError if too few blocks are free."""
        if count > self.num_free:
            raise ValueError(f"{count} blocks wanted, {self.num_free} free")
        taken = []
        for _ in range(count):
            is_wanted = not self._unwanted or self.has_unused
            block, _ = (self._free if is_wanted else self._unwanted).popitem(last=False)
            self._ref_counts[block] = 1
            if block in self._keys:
                if is_wanted:
                    self.on_evict(block, self._keys[block])
                self.evict(block)
                self.num_evictions += 1
            taken.append(block)
        return taken

    def get(self, key: bytes) -> int | None:
        return self._blocks.get(key)

    def share(self, blocks: Iterable[int]) -> None:
        """Raises ValueError for a free block without a key."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                if block not in self._keys:
                    raise ValueError(f"block {block} is free and cannot be shared")
                del (self._unwanted if block in self._unwanted else self._free)[block]
            self._ref_counts[block] += 1

    def register(self, block: int, key: bytes) -> None:
        """Give an allocated block a key, unless another block has it. Raises ValueError for a free block."""
        if self._ref_counts[block] == 0:
            raise ValueError(f"block {block} is free: what it holds is not known")
        if key not in self._blocks:
            self._blocks[key] = block
            self.evicted.discard(key)
            self._keys.setdefault(block, []).append(key)

    def evict(self, block: int) -> None:
        """Like `unregister`, and remember when."""
        self.evicted.add(self._keys.get(block, ()))
        self.unregister(block)

    def unregister(self, block: int) -> None:
        keys = self._keys.pop(block, ())
        for key in keys:
            del self._blocks[key]
        if keys and self._ref_counts[block] == 0:
            self._unwanted.pop(block, None)
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def release(self, blocks: Iterable[int], *, unwanted: bool = False) -> None:
        """unwanted: requests are unlikely to reuse them. Raises ValueError for a free block."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                raise ValueError(f"block {block} is free already")
            self._ref_counts[block] -= 1
            if self._ref_counts[block] > 0:
                continue
            has_key = block in self._keys
            (self._unwanted if unwanted and has_key else self._free)[block] = None
            if not has_key:
                self._free.move_to_end(block, last=False)
