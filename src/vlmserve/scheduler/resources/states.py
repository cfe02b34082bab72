"""KV blocks together with states: where both are cached, what a request takes, and the checkpoints that it leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from vlmserve.cache.prefix import Chain, PrefixCache
from vlmserve.cache.states import StatePool
from vlmserve.layer_specs import CHUNK, NO_SLOT
from vlmserve.scheduler.request import Request
from vlmserve.scheduler.resources.memory import Found, KVMemory, boundaries_of, num_reusable
from vlmserve.scheduler.resources.resource import Resource
from vlmserve.scheduler.state_slots import StateSlots
from vlmserve.steps import SchedulerOutput, StateCopy

NEAR = 16
"""Tokens between boundaries that need one checkpoint, because prompts seldom part between them."""


class StateMemory(KVMemory):
    """Fills block tables, and gives each running request a slot for its state.

    A prefix is found where all blocks, the partly filled ones included, and a checkpoint of the state are cached.
    Requests leave checkpoints at boundaries of their prompts, where prompts part, and where a checkpoint is small
    compared with the KV cache of the tokens before it. They end as checkpoints themselves.
    """

    def __init__(self, cache: PrefixCache, block_size: int, *, states: StatePool, spacing: int, **options: Any) -> None:
        """spacing: tokens whose KV cache is large compared with a checkpoint."""
        super().__init__(cache, block_size, **{**options, "max_chunk": options["max_chunk"] + CHUNK})
        self.states = states
        self._spacing = -(-spacing // CHUNK) * CHUNK
        spared = states.num_slots // 4 if self._prefix_caching else 0
        self._max_working = states.num_slots - spared
        self._num_working = 0
        self._copies: list[StateCopy] = []
        # By the key of a checkpoint, the running request that is going to leave it; others that need it wait.
        self._leaving: dict[bytes, Request] = {}

    @property
    def num_places(self) -> int:
        """Requests that may start. Some slots are kept for checkpoints."""
        return min(self._max_working - self._num_working, self.states.num_free)

    def end_step(self, step: SchedulerOutput) -> None:
        super().end_step(step)
        step.state_copies, self._copies = self._copies, []

    def ready(self, request: Request) -> bool:
        """Return False while a running request computes at least half of what a request needs: waiting pays."""
        found = self._find(request)
        self._found = request, found
        if not self._shares(request):
            return True
        length, start = len(request.token_ids), found.num_tokens
        awaited = (n for n in request.boundaries if start < n < length and 2 * (n - start) >= length - start)
        return not any(_prefix_key(request, n, self._size) in self._leaving for n in awaited)

    def _shares(self, request: Request) -> bool:
        """Return whether a request may read what others have computed."""
        return self._prefix_caching and num_reusable(request) > 0

    def _find(self, request: Request) -> Found:
        if not request.boundaries:
            request.boundaries = boundaries_of(request)
        pages = super()._find(request)
        for num_tokens in self._checkpoints(request, pages.reach) if self._shares(request) else ():
            full = num_tokens // self._size
            keys = request.chains[0]
            chain = Chain(pages.chains[0].keys[:full], request.tail_key(keys, num_tokens, self._size))
            hits, _ = self.cache.find([chain], self._columns)
            if hits[0].end == full and (chain.tail is None or hits[0].tail is not None):
                return Found([chain], hits, pages.reach, num_tokens, needs_tails=True)
        return pages.without_hits()

    def _checkpoints(self, request: Request, reach: int) -> Iterator[int]:
        """Yield numbers of tokens that checkpoints have seen, the largest first. reach: cached full blocks."""
        chain = request.chains[0]
        for full in range(min(reach, len(chain.keys) - 1), -1, -1):
            for extra in self.states.extras(chain.keys[full]):
                num_tokens = full * self._size + extra
                is_shorter = 0 < num_tokens <= num_reusable(request)
                if is_shorter and self.states.get(_prefix_key(request, num_tokens, self._size)) is not None:
                    yield num_tokens

    def acquire(self, request: Request, running: Sequence[Request]) -> bool:
        if self.num_places <= 0 or not super().acquire(request, running):
            return False
        start, source = request.num_computed, NO_SLOT
        keys: list[bytes] = []
        if start:
            keys = [_prefix_key(request, start, self._size)]
            found = self.states.get(keys[0])
            assert found is not None
            source = found
            self.states.hold(source)
        slot = self.states.take()
        if slot is None:
            # Only the checkpoint itself was free.
            self.states.forget(keys.pop())
            slot = source
        request.state = state = StateSlots(slot, source, start)
        state.held = source if source != slot else NO_SLOT
        state.keys = keys
        self._num_working += 1
        self._plan_checkpoints(request, state)
        return True

    def _plan_checkpoints(self, request: Request, state: StateSlots) -> None:
        """Choose where a request leaves checkpoints, and where chunks may end."""
        start, end = state.reached, request.num_prompt_tokens
        _, found = self._found
        wanted = _ranked(request)[: max(1, self.states.num_slots // 2)]
        state.kept = {*wanted[:1]}
        wanted += range(self._spacing, end, self._spacing)
        if (parting := found.reach * self._size // CHUNK * CHUNK) > start:
            # Prompts part there. What the state lacks there is computed once.
            wanted.append(parting)
            state.kept.add(parting)
        cuts = {*request.boundaries, *(span.start for span in request.image_spans), *wanted}
        state.cuts = sorted(cut for cut in cuts if start < cut < end)
        for num_tokens in sorted({*wanted} & {*state.cuts}) if self._prefix_caching else ():
            key = state.leaving[num_tokens] = _prefix_key(request, num_tokens, self._size)
            self._leaving.setdefault(key, request)

    def grow(self, request: Request, num_tokens: int, spare: Sequence[Request] = ()) -> int:
        """States cannot go back, so drafts have no room. See `extend` for how far a chunk reaches."""
        reach = num_tokens
        if 0 < num_tokens < request.num_uncomputed:
            reach = max(num_tokens, _next_end(request, request.num_computed) - request.num_computed)
        return min(super().grow(request, reach, spare), num_tokens, max(1, request.num_uncomputed))

    def extend(self, request: Request, start: int, end: int) -> int:
        return end if self.limit(request, start, end) > start else _next_end(request, start)

    def limit(self, request: Request, start: int, end: int) -> int:
        assert request.state is not None
        end = super().limit(request, start, end)
        return end if end >= len(request.token_ids) else max(start, request.state.last_cut(end))

    def settle(self, step: SchedulerOutput, request: Request, start: int, end: int, wanted: int) -> None:
        """Take slots for the checkpoints within a chunk, as long as there are slots that no request holds."""
        state = request.state
        assert state is not None
        for cut in state.cuts_between(start, end):
            key = state.leaving.get(cut)
            slot = self.states.take() if key is not None and self.states.get(key) is None else None
            if slot is not None:
                state.planned.append((cut, slot))
                state.unsent.append((cut, slot))
            elif cut < end:
                state.unsent.append((cut, state.slot))

    def advance(self, request: Request, num_computed: int) -> None:
        """Register checkpoints, too, before blocks that windows have passed are free."""
        state = request.state  # None: it was preempted, and has its token late.
        if state is not None and state.held != NO_SLOT:
            self.states.release(state.held)
            state.held = NO_SLOT
        if state is not None and state.leaving:
            for num_tokens, slot in state.planned:
                self._register(request, state, num_tokens, slot)
                self.states.release(slot, spare=num_tokens not in state.kept)
            state.planned = []
            for num_tokens in [number for number in state.leaving if number <= num_computed]:
                self._stop_awaiting(request, state.leaving.pop(num_tokens))
        super().advance(request, num_computed)

    def _register(self, request: Request, state: StateSlots, num_tokens: int, slot: int) -> None:
        """Register a checkpoint, and the partly filled blocks that belong to it."""
        key = _prefix_key(request, num_tokens, self._size)
        full, extra = divmod(num_tokens, self._size)
        self.states.register(slot, key, request.chains[0].keys[full], extra)
        self._register_tail(request, num_tokens)
        state.keys.append(key)

    def _stop_awaiting(self, request: Request, key: bytes) -> None:
        if self._leaving.get(key) is request:
            del self._leaving[key]

    def fork(self, parent: Request, child: Request, *, first: bool) -> bool:
        """The first child takes over the slot, the others get a copy."""
        state = parent.state
        assert state is not None
        if not super().fork(parent, child, first=first):
            return False
        slot: int | None = state.slot
        if first:
            state.slot = NO_SLOT
        else:
            slot = self.states.take() if self.num_places > 0 else None
            if slot is None:
                return False
            self._copies.append(StateCopy(state.source, slot))
            self._num_working += 1
        assert slot is not None
        child.state = StateSlots(slot, slot, state.reached)
        return True

    def undo(self, request: Request) -> None:
        """The step may have changed the working state only in part, so it does not become a checkpoint."""
        if request.state is not None:
            request.state.source = NO_SLOT

    def discard(self, request: Request, *, out_of_memory: bool) -> None:
        super().discard(request, out_of_memory=out_of_memory)
        self.undo(request)
        for key in () if request.state is None else request.state.keys:
            self.states.forget(key)

    def release(self, request: Request, *, resumes: bool = False) -> None:
        """Take back slots. The working state becomes a checkpoint, unless a step changes it now."""
        state = request.state
        if state is not None:
            for slot in [slot for _, slot in state.planned] + [state.held] * (state.held != NO_SLOT):
                self.states.release(slot)
            for key in state.leaving.values():
                self._stop_awaiting(request, key)
            if state.slot != NO_SLOT:
                if self._prefix_caching and state.source == state.slot and state.reached == request.num_computed:
                    self._register(request, state, state.reached, state.slot)
                # The next turn comes without this answer's reasoning.
                self.states.release(state.slot, spare=request.thoughts is not None and not resumes)
                self._num_working -= 1
                for number in _ranked(request)[:1] if self._prefix_caching else ():
                    # The next turn begins with this checkpoint for sure, so it is evicted after the answer's.
                    self.states.touch(_prefix_key(request, number, self._size))
        super().release(request, resumes=resumes)


class StatePlaces(Resource):
    """The slots that `StateMemory` gives to requests, as a resource that lower priorities have to give up."""

    def __init__(self, memory: StateMemory) -> None:
        self._memory = memory

    def missing(self, request: Request) -> int:
        return 1

    def room(self, running: Sequence[Request]) -> int:
        return self._memory.num_places


def _next_end(request: Request, start: int) -> int:
    """Return the first place after `start` where a chunk may end."""
    assert request.state is not None
    return min(len(request.token_ids), request.state.next_cut(start))


def _prefix_key(request: Request, num_tokens: int, block_size: int) -> bytes:
    """The key of all of the first `num_tokens` tokens."""
    chain = request.chains[0]
    if (tail := request.tail_key(chain, num_tokens, block_size)) is not None:
        return tail
    request.keys_of_full_blocks(chain, num_tokens // block_size, block_size)
    return chain.keys[num_tokens // block_size]


def _ranked(request: Request) -> list[int]:
    """Return the boundaries of a prompt, the most useful one first.

    The next turn begins with the first one, the end of the last turn, and a repeat of the prompt with the second one.
    """
    last = request.num_prompt_tokens - 1
    images = sorted((span.end for span in request.image_spans), reverse=True)
    turns = sorted(request.boundaries - {last, *images})
    images = [end for end in images if not any(0 <= turn - end < NEAR for turn in turns)]
    ranked = [*turns[-1:], last, *images[:1], *turns[:1], *images[1:], *turns]
    return [number for number in dict.fromkeys(ranked) if 0 < number <= last]
