"""Chooses the checkpoint to read from disk, with the KV blocks before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from vlmserve.cache.fetches import Read
from vlmserve.cache.prefix import Column
from vlmserve.cache.states import stored_key
from vlmserve.scheduler.request import Request
from vlmserve.scheduler.resources.checkpoints import prefix_keys, stored_places
from vlmserve.scheduler.resources.memory import Found, num_reusable


class StoredCheckpoint(NamedTuple):
    num_tokens: int
    blocks: Sequence[bytes]
    states: Sequence[bytes]


class StoredStates(NamedTuple):
    """Immutable, so that a thread may read them."""

    checkpoints: Sequence[StoredCheckpoint]
    """Longest first."""
    num_found: int
    """Tokens that memory has."""
    block_bytes: int
    state_bytes: int

    def read(self, read: Read) -> int:
        """A checkpoint is useless without all of its blocks."""
        for one in self.checkpoints:
            has_blocks = read(one.blocks, self.block_bytes) == len(one.blocks)
            if has_blocks and read(one.states, self.state_bytes) == len(one.states):
                return one.num_tokens
        return self.num_found


def stored_states(
    request: Request,
    found: Found,
    columns: Sequence[Column],
    has: Callable[[bytes], bool],
    *,
    block_bytes: int,
    state_bytes: int,
) -> StoredStates | None:
    """found: what memory has. has: tells whether an entry is on disk. None: no checkpoint there reaches further."""
    size, most, checkpoints = columns[0].block_size, num_reusable(request), []
    for num_tokens in stored_places(request):
        if not found.num_tokens < num_tokens <= most:
            continue
        states = [stored_key(key) for key in prefix_keys(request, num_tokens, size)]
        if all(map(has, states)):
            blocks = _blocks_before(request, num_tokens, found.reach, columns)
            checkpoints.append(StoredCheckpoint(num_tokens, blocks, states))
    return StoredStates(checkpoints, found.num_tokens, block_bytes, state_bytes) if checkpoints else None


def _blocks_before(request: Request, num_tokens: int, reach: int, columns: Sequence[Column]) -> list[bytes]:
    """reach: full blocks in memory, in columns without a window."""
    size, end, keys = columns[0].block_size, num_tokens // columns[0].block_size, list[bytes]()
    for chain in request.chains:
        full = request.keys_of_full_blocks(chain, end, size)
        tail = request.tail_key(chain, num_tokens, size)
        for column in columns:
            first = min(reach, end) if column.window is None else column.first_needed(end)
            keys += [column.key(key) for key in full[first:end]]
            keys += [column.key(tail)] if tail is not None else []
    return keys
