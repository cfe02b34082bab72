"""The KV blocks of requests: what they find cached, take, register and give back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vlmserve.cache.blocks import BlockPool
from vlmserve.cache.prefix import Hit, PrefixCache
from vlmserve.scheduler.request import Request
from vlmserve.scheduler.resources.resource import Resource
from vlmserve.steps import BlockCopy, SchedulerOutput


class Found(NamedTuple):
    """The cached blocks of a waiting request, for each of its tables. At least one token is left to compute, for
    its logits."""

    chains: list[list[bytes]]
    """Keys of its full blocks that may be shared."""
    hits: list[Hit]

    @property
    def end(self) -> int:
        """How many full blocks were found."""
        return self.hits[0].end


class KVMemory(Resource):
    """Fills the block tables of requests. All tables of a request have the same length."""

    in_decodes = True

    def __init__(
        self, cache: PrefixCache, block_size: int, *, prefix_caching: bool, max_chunk: int, window: int | None = None
    ) -> None:
        """max_chunk: maximum number of tokens in a step. window: positions that a token attends to in every layer,
        itself included; None: all."""
        self.cache = cache
        self.pool: BlockPool = cache.pool
        self.queried_tokens = 0
        """Prompt tokens of requests that were admitted for the first time."""
        self.cached_tokens = 0
        """The cached part of `queried_tokens`."""
        self._size = block_size
        self._prefix_caching = prefix_caching
        self._window, self._max_chunk = window, max_chunk
        # By block key, the running request that computes the block; others that need it wait for that.
        self._computing: dict[bytes, Request] = {}
        self._not_finite: list[int] = []
        # The last request that was asked about, and what is cached of it.
        self._found: tuple[Request | None, Found] = None, Found([], [])

    def end_step(self, step: SchedulerOutput) -> None:
        step.block_copies, self.cache.block_copies = self.cache.block_copies, []
        step.blocks_to_zero, self._not_finite = self._not_finite, []
        self._found = None, Found([], [])

    def ready(self, request: Request) -> bool:
        """Return False while running requests compute at least half of what a request needs: waiting pays."""
        found = self._find(request)
        self._found = request, found
        keys, start = found.chains[0], found.end
        end = start
        while end < len(keys) and keys[end] in self._computing:
            end += 1
        missing = len(request.token_ids) - start * self._size
        return end == start or 2 * (end - start) * self._size < missing

    def _find(self, request: Request) -> Found:
        if not self._prefix_caching or request.prompt_logprobs is not None:
            return Found([[] for _ in request.tables], [Hit() for _ in request.tables])
        num_tokens, size = len(request.token_ids) - 1, self._size
        chains = [request.keys_of_full_blocks(table, num_tokens // size, size) for table in request.tables]
        tail_keys = [request.tail_key(table, num_tokens, size) for table in request.tables]
        return Found(chains, self.cache.find(chains, tail_keys, self._first_visible))

    def _first_visible(self, num_blocks: int) -> int:
        """The first block that tokens after that many blocks attend to."""
        if self._window is None:
            return 0
        return max(0, num_blocks * self._size - self._window + 1) // self._size

    def _found_of(self, request: Request) -> Found:
        asked, found = self._found
        assert asked is request, "ask first whether it is ready"
        return found

    def num_found(self, request: Request) -> int:
        return self._found_of(request).end * self._size

    def missing(self, request: Request) -> int:
        """Return the blocks that a request takes, those found that nobody holds, and one to grow for each table."""
        found = self._found_of(request)
        return len(request.tables) * (self._missing_of_table(request, found.end) + 1) + self._num_taken(found.hits)

    def _missing_of_table(self, request: Request, end: int) -> int:
        """Blocks needed at a time. With a window, more are allocated as blocks before the window are freed."""
        reach = len(request.token_ids)
        if self._window is not None:
            reach = min(reach, end * self._size + self._window + self._max_chunk)
        return -(-reach // self._size) - end

    def _num_taken(self, hits: Sequence[Hit]) -> int:
        return sum(map(self.cache.num_taken, hits))

    def room(self, running: Sequence[Request]) -> int:
        taken = sum(len(one.tables) for one in running if one.num_uncomputed == 1 and self._is_full(one))
        return self.pool.num_free - taken - _num_growing(running)

    def _is_full(self, request: Request) -> bool:
        """Return whether a request needs another block for its next token."""
        return request.num_computed == len(request.tables[0].blocks) * self._size

    def acquire(self, request: Request, running: Sequence[Request]) -> bool:
        """Take the cached blocks of a request and the blocks that it needs at a time. The request resumes after the
        cached tokens."""
        found = self._found_of(request)
        hits, missing = found.hits, self._missing_of_table(request, found.end)
        free = self.pool.num_free - missing * len(request.tables) - _num_growing(running)
        if hits[0].tail is not None and self._num_taken(hits) > free:
            hits = [hit._replace(tail=None) for hit in hits]
        if self._num_taken(hits) > free:
            return False
        request.first_block = hits[0].first
        for table, blocks in zip(request.tables, self.cache.take(hits, found.chains, missing), strict=True):
            table.blocks.extend([0] * request.first_block)
            table.blocks.extend(blocks)
        request.num_computed = found.end * self._size
        if hits[0].tail is not None:
            request.num_computed = len(request.token_ids) - 1
        for key in found.chains[0][found.end :]:
            self._computing.setdefault(key, request)
        if request.num_cached is None:
            request.num_cached = request.num_computed
            self.queried_tokens += request.num_prompt_tokens
            self.cached_tokens += request.num_cached
        return True

    def grow(self, request: Request, num_tokens: int, spare: Sequence[Request] = ()) -> int:
        tables, size = request.tables, self._size
        reach = request.num_computed + num_tokens
        if reach <= len(tables[0].blocks) * size:
            return num_tokens
        missing = -(-reach // size) - len(tables[0].blocks)
        missing = min(missing, (self.pool.num_free - _num_growing(spare)) // len(tables))
        for table in tables if missing > 0 else ():
            table.blocks.extend(self.pool.allocate(missing))
        return min(num_tokens, len(tables[0].blocks) * size - request.num_computed)

    def may_plan_ahead(self, following: Sequence[tuple[Request, int]]) -> bool:
        wanted = 0
        for request, num_tokens in following:
            missing = -(-(request.num_computed + num_tokens) // self._size) - len(request.tables[0].blocks)
            wanted += max(0, missing) * len(request.tables)
        return wanted <= self.pool.num_free

    def advance(self, request: Request, num_computed: int) -> None:
        """Register the blocks that become full, and the prompt's last one. Free blocks before the window."""
        before, size = request.num_computed, self._size
        if self._prefix_caching and num_computed // size > before // size:
            for table in request.tables:
                keys = request.keys_of_full_blocks(table, num_computed // size, size)
                for index in range(before // size, num_computed // size):
                    self.pool.register(table.blocks[index], keys[index])
                    self._computing.pop(keys[index], None)
        if before < request.num_prompt_tokens <= num_computed:
            self._register_tail(request, request.num_prompt_tokens - 1)
        if self._window is not None:
            needed = max(0, num_computed - self._window + 1) // size
            if needed > request.first_block:
                for table in request.tables:
                    self.pool.release(table.blocks[request.first_block : needed])
                request.first_block = needed

    def _register_tail(self, request: Request, num_tokens: int) -> None:
        """Register the key of the partly filled block that ends with token `num_tokens`, all of them computed."""
        for table in request.tables if self._prefix_caching else ():
            key = request.tail_key(table, num_tokens, self._size)
            if key is not None:
                self.pool.register(table.blocks[num_tokens // self._size], key)

    def fork(self, parent: Request, child: Request, *, first: bool) -> bool:
        """Share the full blocks. The first child takes over a partly filled block, the others get a copy."""
        full, filled = divmod(parent.num_computed, self._size)
        copies = not first and filled > 0
        if copies and self.pool.num_free < len(parent.tables):
            return False
        for source, target in zip(parent.tables, child.tables, strict=True):
            end = full if copies or not filled else full + 1
            self.pool.share(source.blocks[parent.first_block : end])
            target.blocks.extend(source.blocks[:end])
            if copies:
                [own] = self.pool.allocate(1)
                self.cache.block_copies.append(BlockCopy("copy", source.blocks[full], own))
                target.blocks.append(own)
        child.first_block, child.num_computed = parent.first_block, parent.num_computed
        return True

    def discard(self, request: Request, *, out_of_memory: bool) -> None:
        """Unregister a failed request's blocks and have them zeroed, because they may hold NaN, or were not computed.

        A block is read as a whole, and a masked NaN still makes a sum NaN.
        """
        for table in request.tables:
            for block in table.blocks[request.first_block :]:
                self.pool.unregister(block)
                if self.pool.ref_count(block) == 1:
                    self._not_finite.append(block)

    def release(self, request: Request, *, resumes: bool = False) -> None:
        if resumes:
            self._register_tail(request, request.num_computed)
        # The last block first: it is of no use without those before it, so it is evicted before them.
        for table in request.tables:
            self.pool.release(reversed(table.blocks[request.first_block :]))
        request.drop_blocks()
        for key in request.tables[0].keys:
            if self._computing.get(key) is request:
                del self._computing[key]


def _num_growing(running: Sequence[Request]) -> int:
    """Blocks that running requests may need soon: one for each table."""
    return sum(len(request.tables) for request in running)
