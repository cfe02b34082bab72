"""The KV blocks of a request in one pass of the model."""

from __future__ import annotations

from array import array


class BlockTable:
    """Blocks of a request's tokens, from the first one on, and what their content is found by.

    blocks: their ids; a preempted request gets a new array. keys: of full blocks, behind that of the chain's root.
    tail: for a number of tokens, the key of the partly filled block that ends with them. num_sent: blocks that the
    runner knows.
    """

    __slots__ = ("blocks", "keys", "num_sent", "tail")

    def __init__(self, root_key: bytes) -> None:
        self.blocks = array("i")
        self.keys = [root_key]
        self.tail = (0, b"")
        self.num_sent = 0

    def new_blocks(self) -> array[int]:
        """Those that the runner does not know yet, which it is about to be told."""
        sent, self.num_sent = self.num_sent, len(self.blocks)
        return self.blocks[sent:]

    def drop(self) -> None:
        """Forget the blocks, which were freed."""
        self.blocks = array("i")
        self.num_sent = 0

    def restart(self, root_key: bytes) -> None:
        """Forget all keys, and have another root."""
        self.keys = [root_key]
        self.tail = (0, b"")

    def fork(self) -> BlockTable:
        """One without blocks, for a request with the same tokens so far."""
        other = BlockTable(self.keys[0])
        other.keys, other.tail = self.keys[:], self.tail
        return other
