"""The KV blocks of requests."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from vlmserve.cache.blocks import BlockPool
from vlmserve.cache.prefix import Chain, Column, Hit, PrefixCache
from vlmserve.layer_specs import window_blocks
from vlmserve.scheduler.block_table import BlockTable
from vlmserve.scheduler.request import Request
from vlmserve.scheduler.resources.misses import Misses
from vlmserve.scheduler.resources.resource import Resource
from vlmserve.steps import BlockCopy, SchedulerOutput
from vlmserve.tasks import Prefill


class Found(NamedTuple):
    """Cached blocks. At least one token stays uncomputed, for its logits."""

    chains: list[Chain]
    """Keys of its shareable blocks, by pass."""
    hits: list[Hit]
    """One for each of its future tables."""
    reach: int
    """Full blocks found in columns without a window; `end` if all have windows."""
    num_tokens: int
    """Reusable tokens, in full blocks and the partly filled block after them."""

    needs_tails: bool = False
    """Partly filled blocks need a state, and full blocks need the partly filled one."""

    @property
    def end(self) -> int:
        return self.hits[0].end

    def without_hits(self) -> Found:
        return Found([Chain(()) for _ in self.chains], [Hit() for _ in self.hits], self.reach, 0)

    def without_tails(self, block_size: int) -> Found:
        if self.needs_tails:
            return self.without_hits()
        hits = [hit._replace(tail=None) for hit in self.hits]
        return self._replace(hits=hits, num_tokens=self.end * block_size)


_NOTHING = Found([], [], 0, 0)


def take_shared_keys(request: Request, other: Request, block_size: int) -> None:
    """Copy the keys of blocks within `num_shared` if both requests share these tokens and images."""
    count = request.num_shared
    if count != other.num_shared or request.token_ids[:count] != other.token_ids[:count]:
        return
    if _images_within(request, count) != _images_within(other, count):
        return
    if request.bidirectional_span_at(count) is not None or other.bidirectional_span_at(count) is not None:
        return  # keys cover different later tokens
    for own, known in zip(request.chains, other.chains, strict=False):
        if own.keys == known.keys[:1]:
            own.keys = known.keys[: count // block_size + 1]
            own.tails |= {length: key for length, key in known.tails.items() if length == count}


def _images_within(request: Request, count: int) -> list[tuple[int, int, bytes]]:
    return [(span.start, span.end, span.image.key) for span in request.image_spans if span.start < count]


def num_reusable(request: Request) -> int:
    """States of later tokens are needed."""
    if request.prompt_logprobs is not None:
        return 0
    most, reads_from = len(request.token_ids) - 1, request.task.reads_from(request.num_prompt_tokens)
    return most if reads_from is None else min(most, reads_from)


class KVMemory(Resource):
    """One table per cache column and pass."""

    in_decodes = True

    def __init__(
        self,
        cache: PrefixCache,
        block_size: int,
        *,
        prefix_caching: bool,
        max_chunk: int,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        """max_chunk: maximum tokens of a step, except bidirectional spans. windows: see `CacheLayout`."""
        self.cache = cache
        self.pool: BlockPool = cache.pool
        self.queried_tokens = 0
        """Prompt tokens of newly admitted requests."""
        self.cached_tokens = 0
        """The cached part of `queried_tokens`."""
        self._size = block_size
        self._prefix_caching = prefix_caching
        self._max_chunk = max_chunk
        self.stores: list[tuple[int, bytes]] | None = None
        """Blocks with new contents and their keys, to store on disk. None: no disk cache."""
        self.forgotten: list[bytes] = []
        """Keys to delete from disk."""
        self.columns = [Column(number, window, block_size) for number, window in enumerate(windows)]
        self.misses = Misses(cache, self.columns, block_size)
        # equal windows free the same blocks
        self._windowed = [
            [number for number, other in enumerate(windows) if other == window]
            for window in dict.fromkeys(windows)
            if window is not None
        ]
        self.computing: dict[bytes, Request] = {}
        """Running requests that compute blocks, by block key."""
        self._not_finite: list[int] = []
        # the last request passed to `ready`
        self._found: tuple[Request | None, Found] = None, _NOTHING
        # the step's last request with a shared beginning, whose keys the next one may take
        self._sharing: Request | None = None

    def end_step(self, step: SchedulerOutput) -> None:
        step.block_copies, self.cache.block_copies = self.cache.block_copies, []
        step.block_contents, self.cache.block_contents = self.cache.block_contents, []
        step.blocks_to_zero, self._not_finite = self._not_finite, []
        self._found, self._sharing = (None, _NOTHING), None

    def ready(self, request: Request) -> bool:
        """False while running requests compute at least half of the missing tokens: waiting is faster."""
        found = self.find(request)
        self._found = request, found
        keys, end = found.chains[0].keys, found.end
        while end < len(keys) and keys[end] in self.computing:
            end += 1
        missing = len(request.token_ids) - found.num_tokens
        return end == found.end or 2 * (end * self._size - found.num_tokens) < missing

    def find(self, request: Request) -> Found:
        if not self._prefix_caching or not num_reusable(request):
            chains = [Chain(()) for _ in request.chains]
            return Found(chains, [Hit() for _ in request.chains for _ in self.columns], 0, 0)
        num_tokens, size = num_reusable(request), self._size
        if request.num_shared:
            if self._sharing is not None and self._sharing is not request:
                take_shared_keys(request, self._sharing, size)
            self._sharing = request
        chains = [
            Chain(request.keys_of_full_blocks(keys, num_tokens // size, size), request.tail_key(keys, num_tokens, size))
            for keys in request.chains
        ]
        hits, reach = self.cache.find(chains, self.columns)
        if hits[0].tail is not None:
            return Found(chains, hits, reach, num_tokens)
        found = Found(chains, hits, reach, hits[0].end * size)
        if (num_tokens := min(request.num_shared, num_tokens)) % size and num_tokens // size == found.end:
            # the last block of the shared beginning may be cached
            tails = [request.tail_key(keys, num_tokens, size) for keys in request.chains]
            hits = self.cache.with_tails(hits, tails, self.columns)
            found = found if hits[0].tail is None else found._replace(hits=hits, num_tokens=num_tokens)
        return found

    def _found_of(self, request: Request) -> Found:
        asked, found = self._found
        assert asked is request, "ask first whether it is ready"
        return found

    def num_found(self, request: Request) -> int:
        return self._found_of(request).end * self._size

    def missing(self, request: Request) -> int:
        """New blocks, found unheld blocks, and one per table to grow."""
        found = self._found_of(request)
        new = sum(_num_new(request, self.columns, found.end, self._max_chunk)) + len(self.columns)
        return len(request.chains) * new + self.cache.num_taken(found.hits)

    def room(self, running: Sequence[Request]) -> int:
        taken = sum(len(one.tables) for one in running if one.num_uncomputed == 1 and one.num_computed == one.capacity)
        return self.pool.num_free - taken - _num_growing(running)

    def acquire(self, request: Request, running: Sequence[Request]) -> bool:
        whole = self._found_of(request)
        free = self.pool.num_free - _num_growing(running)
        for found in (whole, whole.without_tails(self._size)):
            hits = found.hits
            new = _num_new(request, self.columns, found.end, self._max_chunk) * len(request.chains)
            if sum(new) + self.cache.num_taken(hits) <= free:
                break
        else:
            return False
        chains = [(chain.keys, column) for chain in found.chains for column in self.columns]
        keys = [
            [column.key(key) for key in keys[hit.first : hit.end]]
            for (keys, column), hit in zip(chains, hits, strict=True)
        ]
        if self._windowed and not request.boundaries:
            request.boundaries = boundaries_of(request)
        if self._windowed and found.reach:
            # Prompts part there. Windows' missing blocks are computed once.
            request.boundaries = request.boundaries | {found.reach * self._size}
        for hit, blocks in zip(hits, self.cache.take(hits, keys, new), strict=True):
            table = BlockTable()
            table.first = hit.first
            table.blocks.extend([0] * hit.first)
            table.blocks.extend(blocks)
            request.tables.append(table)
        self._note_growth(request)
        request.num_computed = found.num_tokens
        for key in found.chains[0].keys[found.end :]:
            self.computing.setdefault(key, request)
        if request.num_cached is None:
            request.num_cached = request.num_computed
            self.queried_tokens += request.num_prompt_tokens
            self.cached_tokens += request.num_cached
            request.missed = self.misses.note(request, num_reusable(request) * self._prefix_caching, whole.reach)
        return True

    def _note_growth(self, request: Request) -> None:
        request.capacity = min(len(table.blocks) for table in request.tables) * self._size
        request.unsent = True

    def grow(self, request: Request, num_tokens: int, spare: Sequence[Request] = ()) -> int:
        reach = request.num_computed + num_tokens
        if request.bidirectional_spans and (span := request.bidirectional_span_at(reach)) is not None:
            reach = span[1]  # where the chunk may end
        if reach <= request.capacity:
            return num_tokens
        free = self.pool.num_free - _num_growing(spare)
        lens = [len(table.blocks) for table in request.tables]
        longer = range(min(lens) + 1, -(-reach // self._size) + 1)
        affordable = bisect_right(longer, free, key=lambda count: sum(max(0, count - length) for length in lens))
        if affordable:
            count = longer[affordable - 1]
            for table, length in zip(request.tables, lens, strict=True):
                table.blocks.extend(self.pool.allocate(max(0, count - length)))
            self._note_growth(request)
        return max(0, min(num_tokens, request.capacity - request.num_computed))

    def limit(self, request: Request, start: int, end: int) -> int:
        return min(end, request.capacity)

    def may_plan_ahead(self, following: Sequence[tuple[Request, int]]) -> bool:
        wanted = 0
        for request, num_tokens in following:
            reach = request.num_computed + num_tokens
            if reach > request.capacity:
                count = -(-reach // self._size)
                wanted += sum(max(0, count - len(table.blocks)) for table in request.tables)
        return wanted <= self.pool.num_free

    def advance(self, request: Request, num_computed: int) -> None:
        """Register full blocks and the prompt's last block. Free blocks outside windows."""
        before, size = request.num_computed, self._size
        if self._prefix_caching and num_computed // size > before // size:
            self._register_full(request, before // size, num_computed // size)
        if before < request.num_prompt_tokens <= num_computed:
            self._register_tail(request, request.num_prompt_tokens - 1, stores=self.stores)
            if isinstance(request.task, Prefill):
                self._register_tail(request, request.num_prompt_tokens, stores=self.stores)
        for numbers in self._windowed if request.tables else ():
            needed = self.columns[numbers[0]].first_visible(num_computed)
            if needed > request.tables[numbers[0]].first:
                self._free_before(request, numbers, needed)

    def _free_before(self, request: Request, numbers: Sequence[int], needed: int) -> None:
        """Free blocks in columns of one window, as unwanted, except within a window before a boundary."""
        first = request.tables[numbers[0]].first
        wanted = _wanted(request, self.columns[numbers[0]], first, needed)
        unwanted = [index for index in range(first, needed) if index not in wanted]
        for start in range(0, len(request.tables), len(self.columns)):
            for number in numbers:
                table = request.tables[start + number]
                self.pool.release([table.blocks[index] for index in unwanted], unwanted=True)
                self.pool.release([table.blocks[index] for index in wanted])
                table.first = needed

    def _register_full(self, request: Request, start: int, end: int, *, is_proven: bool = True) -> None:
        """is_proven: no step in flight writes the blocks, so they may be stored."""
        tables = iter(request.tables)
        for chain in request.chains:
            keys = request.keys_of_full_blocks(chain, end, self._size)
            for column, table in zip(self.columns, tables, strict=False):
                for index in range(start, end):
                    self.pool.register(table.blocks[index], column.key(keys[index]))
                if self.stores is not None and is_proven:
                    self.stores += [(table.blocks[index], column.key(keys[index])) for index in range(start, end)]
            for key in keys[start:end]:
                self.computing.pop(key, None)

    def _register_tail(self, request: Request, num_tokens: int, stores: list[tuple[int, bytes]] | None = None) -> None:
        """The partly filled block after `num_tokens` computed tokens.

        stores: receives the block, unless a step may change it first.
        """
        tables = iter(request.tables)
        for chain in request.chains if self._prefix_caching else ():
            key = request.tail_key(chain, num_tokens, self._size)
            for column, table in zip(self.columns, tables, strict=False):
                if key is not None:
                    self.pool.register(table.blocks[num_tokens // self._size], column.key(key))
                    if stores is not None:
                        stores.append((table.blocks[num_tokens // self._size], column.key(key)))

    def fork(self, parent: Request, child: Request, *, first: bool) -> bool:
        """The first child takes a partly filled block over, others get a copy."""
        full, filled = divmod(parent.num_computed, self._size)
        copies = not first and filled > 0
        if copies and self.pool.num_free < len(parent.tables):
            return False
        for source in parent.tables:
            end = full if copies or not filled else full + 1
            self.pool.share(source.blocks[source.first : end])
            target = BlockTable()
            target.first = source.first
            target.blocks.extend(source.blocks[:end])
            if copies:
                [own] = self.pool.allocate(1)
                self.cache.block_copies.append(BlockCopy("copy", source.blocks[full], own))
                target.blocks.append(own)
            child.tables.append(target)
        self._note_growth(child)
        child.num_computed = parent.num_computed
        return True

    def discard(self, request: Request, *, out_of_memory: bool) -> None:
        """Forget what a failed request found or computed, also on the host, and zero its unshared blocks, which may
        hold NaN.
        """
        forgotten = []
        for chain in request.chains:
            own = (*chain.keys[1:], *chain.tails.values())
            keys = [column.key(key) for column in self.columns for key in own]
            forgotten += [block for key in keys if (block := self.cache.forget(key)) is not None]
            self.forgotten += keys if self.stores is not None else ()
        held = [block for table in request.tables for block in table.held]
        for block in held:
            self.pool.unregister(block)
        self._not_finite += [block for block in held if self.pool.ref_count(block) == 1]
        self._not_finite += [block for block in forgotten if self.pool.ref_count(block) == 0]

    def release(self, request: Request, *, resumes: bool = False) -> None:
        if resumes:
            self._register_tail(request, request.num_computed)
        # earlier blocks are useful without later ones
        for table in request.tables:
            self.pool.release(reversed(table.held))
        request.drop_blocks()
        for key in request.chains[0].keys:
            if self.computing.get(key) is request:
                del self.computing[key]


def _num_growing(running: Sequence[Request]) -> int:
    return sum(len(request.tables) for request in running)


def _num_new(request: Request, columns: Sequence[Column], end: int, max_chunk: int) -> list[int]:
    """After the first `end` blocks of each table."""
    size = columns[0].block_size
    whole = -(-len(request.token_ids) // size)
    # one step computes a whole span
    chunk = max([max_chunk, *(last - first for first, last in request.bidirectional_spans)])
    counts = [
        min(whole, column.first_needed(end) + window_blocks(column.window, chunk, size)) if column.window else whole
        for column in columns
    ]
    # a smaller window may round up to one more block
    return [min(count, counts[0]) - end for count in counts]


def turn_ends(request: Request) -> list[int]:
    prompt = request.token_ids[: request.num_prompt_tokens]
    return [place for place, token in enumerate(prompt, start=1) if token in request.turn_end_ids]


def boundaries_of(request: Request) -> set[int]:
    """The ends of the first turn, last turn and images, and what a repeated prompt reuses."""
    turns = turn_ends(request)
    return {*turns[:1], *turns[-1:], *(span.end for span in request.image_spans), request.num_prompt_tokens - 1}


def _wanted(request: Request, column: Column, start: int, end: int) -> list[int]:
    """Blocks ``start <= i < end`` within a window before a boundary, last first."""
    wanted: set[int] = set()
    for boundary in request.boundaries:
        first = column.first_needed(boundary // column.block_size)
        wanted.update(range(max(start, first), min(end, -(-boundary // column.block_size))))
    return sorted(wanted, reverse=True)
