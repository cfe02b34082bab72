"""The pool of KV blocks: which are free, how many hands hold each of the others, and what they are known to hold.

A block that nobody holds is free, yet it keeps its content, and its key leads to it, until it is taken for something
else: blocks without a key first, then those that were released longest ago.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable


class BlockPool:
    """Ref-counted block ids ``0 <= id < num_blocks``, found again by the 32-byte key of their content."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._ref_counts = array("i", bytes(4 * num_blocks))
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that a key leads to, held ones included."""
        return len(self._keys)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each held once, their content forgotten.

        Raises ValueError, taking none, if fewer are free.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._ref_counts[block] = 1
            if block in self._keys:
                self.forget(block)
                self.num_evictions += 1
        return taken

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest run of leading keys that are all known. They are not held by this."""
        found = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks once more. Raises ValueError for a free one that no key leads to: its content is nobody's."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                if block not in self._keys:
                    raise ValueError(f"block {block} is free and cannot be shared")
                del self._free[block]
            self._ref_counts[block] += 1

    def register(self, block: int, key: bytes) -> None:
        """Say what a held block holds, once it is full and computed.

        If another block holds the same already, that one stays the one to be found. Raises ValueError for a free block
        and for one with another key.
        """
        if self._ref_counts[block] == 0 or self._keys.get(block, key) != key:
            raise ValueError(f"block {block} is free or holds something else")
        if key not in self._blocks:
            self._blocks[key] = block
            self._keys[block] = key

    def forget(self, block: int) -> None:
        """Let no key lead to a block any more; who holds it keeps it."""
        key = self._keys.pop(block, None)
        if key is not None:
            del self._blocks[key]
            if self._ref_counts[block] == 0:
                self._free.move_to_end(block, last=False)

    def release(self, blocks: Iterable[int]) -> None:
        """Let go of blocks; one that nobody holds any more is free, and those released first are taken first.

        Raises ValueError for one that is free already.
        """
        for block in blocks:
            if self._ref_counts[block] == 0:
                raise ValueError(f"block {block} is free already")
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if block not in self._keys:
                    self._free.move_to_end(block, last=False)
