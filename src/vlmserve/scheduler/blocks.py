"""The KV blocks of requests: what they find cached, take, register and give back."""

from __future__ import annotations

from typing import Literal, NamedTuple

from vlmserve.cache.blocks import BlockPool
from vlmserve.cache.prefix import Hit, PrefixCache
from vlmserve.scheduler.request import Request
from vlmserve.steps import BlockCopy


class Found(NamedTuple):
    """What is cached of a waiting request, in each of its tables.

    chains: keys of its full blocks that may be shared. At least one token is left to compute, for its logits.
    """

    chains: list[list[bytes]]
    hits: list[Hit]

    @property
    def end(self) -> int:
        """How many full blocks were found."""
        return self.hits[0].end


class RequestBlocks:
    """Fills the block tables of requests, each with as many blocks as the others of its request."""

    def __init__(
        self, cache: PrefixCache, block_size: int, *, prefix_caching: bool, window: int | None, max_chunk: int
    ) -> None:
        """window: of positions that a token attends to in every layer, itself included; None: all. max_chunk: tokens of
        a step at most."""
        self.cache = cache
        self.pool: BlockPool = cache.pool
        self._size = block_size
        self._prefix_caching = prefix_caching
        self._window, self._max_chunk = window, max_chunk
        # By block key, the running request that computes the block; others that need it wait for that.
        self._computing: dict[bytes, Request] = {}
        self._not_finite: list[int] = []

    def find(self, request: Request) -> Found:
        """The cached prefix of a waiting request."""
        if not self._prefix_caching or request.prompt_logprobs is not None:
            return Found([[] for _ in request.tables], [Hit() for _ in request.tables])
        num_tokens, size = len(request.token_ids) - 1, self._size
        chains = [request.keys_of_full_blocks(table, num_tokens // size, size) for table in request.tables]
        tail_keys = [request.tail_key(table, num_tokens, size) for table in request.tables]
        return Found(chains, self.cache.find_all(chains, tail_keys, self._first_visible))

    def _first_visible(self, num_blocks: int) -> int:
        """The first block that tokens after that many blocks attend to."""
        if self._window is None:
            return 0
        return max(0, num_blocks * self._size - self._window + 1) // self._size

    def is_being_computed(self, request: Request, found: Found) -> bool:
        """Whether running requests are computing at least half of what a request needs; then waiting for it pays."""
        keys, start = found.chains[0], found.end
        end = start
        while end < len(keys) and keys[end] in self._computing:
            end += 1
        missing = len(request.token_ids) - start * self._size
        return end > start and 2 * (end - start) * self._size >= missing

    def num_missing(self, request: Request, found: Found) -> int:
        """How many free blocks a waiting request needs at a time, with those that were found and that nobody holds.

        With a sliding window, these are a window and a chunk; more are allocated as blocks before the window are freed.
        """
        return len(request.tables) * self._missing_of_table(request, found.end) + self._num_taken(found)

    def _missing_of_table(self, request: Request, end: int) -> int:
        reach = len(request.token_ids)
        if self._window is not None:
            reach = min(reach, end * self._size + self._window + self._max_chunk)
        return -(-reach // self._size) - end

    def _num_taken(self, found: Found) -> int:
        return sum(map(self.cache.num_taken, found.hits))

    def take(self, request: Request, found: Found, spare: int) -> bool:
        """Give a waiting request what was found and the blocks that it needs at a time, if so many more are free then.
        It goes on behind what is computed."""
        hits, missing = found.hits, self._missing_of_table(request, found.end)
        free = self.pool.num_free - missing * len(request.tables) - spare
        if hits[0].tail is not None and self._num_taken(found) > free:
            hits = [hit._replace(tail=None) for hit in hits]
        if sum(map(self.cache.num_taken, hits)) > free:
            return False
        request.first_block = hits[0].first
        for table, blocks in zip(request.tables, self.cache.take_all(hits, found.chains, missing), strict=True):
            table.blocks.extend([0] * request.first_block)
            table.blocks.extend(blocks)
        request.num_computed = found.end * self._size
        if hits[0].tail is not None:
            request.num_computed = len(request.token_ids) - 1
        for key in found.chains[0][found.end :]:
            self._computing.setdefault(key, request)
        return True

    def allocate(self, request: Request, num_tokens: int) -> int:
        """Allocate the blocks that the next tokens of a request need, as far as blocks are free.

        Returns how many of the next `num_tokens` tokens have blocks then.
        """
        reach = min(request.num_computed + num_tokens, len(request.token_ids))
        missing = -(-reach // self._size) - len(request.block_table)
        if missing > 0:
            request.grow(min(missing, self.pool.num_free // len(request.tables)), self.pool)
        return min(num_tokens, len(request.block_table) * self._size - request.num_computed)

    def register(self, request: Request, num_computed: int) -> None:
        """Register the keys of the blocks that become full when `num_computed` tokens are computed."""
        before, after = request.num_computed // self._size, num_computed // self._size
        if after > before and self._prefix_caching:
            for table in request.tables:
                keys = request.keys_of_full_blocks(table, after, self._size)
                for index in range(before, after):
                    self.pool.register(table.blocks[index], keys[index])
                    self._computing.pop(keys[index], None)

    def register_tail(self, request: Request, num_tokens: int) -> None:
        """Register the key of the partly filled block that ends with token `num_tokens`, all of them computed."""
        for table in request.tables if self._prefix_caching else ():
            key = request.tail_key(table, num_tokens, self._size)
            if key is not None:
                self.pool.register(table.blocks[num_tokens // self._size], key)

    def free_before_window(self, request: Request) -> None:
        """Free the blocks that no later token attends to."""
        if self._window is None:
            return
        needed = max(0, request.num_computed - self._window + 1) // self._size
        if needed > request.first_block:
            for table in request.tables:
                self.pool.release(table.blocks[request.first_block : needed])
            request.first_block = needed

    def share(self, parent: Request, child: Request, full: int, last: Literal["copy", "share", "none"]) -> None:
        """Let a request have the first `full` blocks of another one's tables. last: what it gets of the block after
        them."""
        for source, target in zip(parent.tables, child.tables, strict=True):
            self.pool.share(source.blocks[parent.first_block : full])
            target.blocks.extend(source.blocks[:full])
            if last == "copy":
                [own] = self.pool.allocate(1)
                self.cache.block_copies.append(BlockCopy("copy", source.blocks[full], own))
                target.blocks.append(own)
            elif last == "share":
                self.pool.share(source.blocks[full:])
                target.blocks.append(source.blocks[full])
        child.first_block, child.num_computed = parent.first_block, parent.num_computed

    def discard_contents(self, request: Request) -> None:
        """Unregister a failed request's blocks and have them zeroed, because they may hold NaN, or were not computed.

        A block is read as a whole, and a masked NaN still makes a sum NaN.
        """
        for table in request.tables:
            for block in table.blocks[request.first_block :]:
                self.pool.unregister(block)
                if self.pool.ref_count(block) == 1:
                    self._not_finite.append(block)

    def release(self, request: Request) -> None:
        """Free all blocks of a request."""
        # The last block first: it is of no use without those before it, so it is evicted before them.
        for table in request.tables:
            self.pool.release(reversed(table.blocks[request.first_block :]))
        request.drop_blocks()
        for key in request.tables[0].keys:
            if self._computing.get(key) is request:
                del self._computing[key]

    def take_changes(self) -> tuple[list[BlockCopy], list[int]]:
        """Copies to make and blocks to zero since the last call."""
        copies, self.cache.block_copies = self.cache.block_copies, []
        zeroed, self._not_finite = self._not_finite, []
        return copies, zeroed
