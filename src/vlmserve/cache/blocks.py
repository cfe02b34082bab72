"""The pool of KV blocks: which are free, and how many hands hold each of the others."""

from __future__ import annotations

from array import array
from collections.abc import Iterable


class BlockPool:
    """Ref-counted block ids ``0 <= id < num_blocks``. It knows nothing of what the blocks hold."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._ref_counts = array("i", bytes(4 * num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each held once. Raises ValueError, taking none, if fewer are free."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._ref_counts[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks that somebody holds once more. Raises ValueError for a free one."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                raise ValueError(f"block {block} is free and cannot be shared")
            self._ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Let go of blocks; one that nobody holds any more is free. Raises ValueError for one that is free already."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                raise ValueError(f"block {block} is free already")
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free.append(block)
