"""A request's KV blocks, and the keys of their content."""

from __future__ import annotations

from array import array


class KeyChain:
    __slots__ = ("keys", "tails")

    def __init__(self, root_key: bytes) -> None:
        self.keys = [root_key]
        """The root key, then keys of full blocks."""
        self.tails: dict[int, bytes] = {}
        """Keys of partly filled blocks, by number of tokens up to their end."""

    def copy(self) -> KeyChain:
        other = KeyChain(self.keys[0])
        other.keys, other.tails = self.keys[:], {**self.tails}
        return other


class BlockTable:
    __slots__ = ("blocks", "first", "num_sent")

    def __init__(self) -> None:
        self.blocks = array("i")
        """Ids from the first token on. A preempted request gets new tables."""
        self.first = 0
        """The first held block. Earlier blocks are outside the attention window."""
        self.num_sent = 0
        """Blocks that the runner knows."""

    @property
    def held(self) -> array[int]:
        return self.blocks[self.first :]

    def new_blocks(self) -> array[int]:
        sent, self.num_sent = self.num_sent, len(self.blocks)
        return self.blocks[sent:]
