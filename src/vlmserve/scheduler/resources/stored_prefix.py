"""Chooses the KV blocks to read from disk, and their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vlmserve.cache.fetches import Read
from vlmserve.cache.prefix import Chain, Column
from vlmserve.scheduler.request import Request
from vlmserve.scheduler.resources.memory import Found, num_reusable


class StoredPrefix(NamedTuple):
    """Immutable, so that a thread may read them."""

    chains: Sequence[Chain]
    columns: Sequence[Column]
    start: int
    tails: dict[int, list[list[bytes]]]
    """Keys of partly filled blocks by block number: for each prefix that ends there, one per chain."""
    block_size: int
    block_bytes: int

    @property
    def first_keys(self) -> list[bytes]:
        """Without these, nothing on disk is useful."""
        keys = self.chains[0].keys if self.chains else ()
        first = [*keys[self.start : self.start + 1], *(tail[0] for tail in self.tails.get(self.start, ()))]
        return [self.columns[0].key(key) for key in first]

    def read(self, read: Read) -> int:
        size, chains, columns = self.block_bytes, self.chains, self.columns
        whole = [column for column in columns if column.window is None] or columns
        numbers = range(self.start, len(chains[0].keys))
        keys = [column.key(chain.keys[number]) for number in numbers for chain in chains for column in whole]
        end = self.start + read(keys, size) // (len(chains) * len(whole))
        for chain in chains:
            for column in columns:
                needed = range(column.first_needed(end), end) if column.window else ()
                read([column.key(chain.keys[number]) for number in reversed(needed)], size)
        for tail in self.tails.get(end, ()):
            read([column.key(key) for key in tail for column in columns], size)
        return end * self.block_size


def stored_prefix(request: Request, found: Found, columns: Sequence[Column], block_bytes: int) -> StoredPrefix | None:
    """found: what memory has. None: it has all that the request can reuse."""
    size, most = columns[0].block_size, num_reusable(request)
    if not found.chains or not most or found.num_tokens == most:
        return None
    chains = [Chain(tuple(request.keys_of_full_blocks(one, most // size, size))) for one in request.chains]
    tails: dict[int, list[list[bytes]]] = {}
    for num_tokens in {most, min(request.num_shared, most)}:
        keys = [request.tail_key(one, num_tokens, size) for one in request.chains]
        tails.setdefault(num_tokens // size, []).append([key for key in keys if key is not None])
    return StoredPrefix(
        chains, columns, found.end, {number: [*filter(None, some)] for number, some in tails.items()}, size, block_bytes
    )
