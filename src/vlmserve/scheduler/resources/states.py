"""KV blocks together with states: where both are cached, what a request takes, and the checkpoints that it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlmserve.cache.prefix import Chain, PrefixCache
from vlmserve.cache.states import StatePool
from vlmserve.layer_specs import CHUNK, NO_SLOT
from vlmserve.scheduler.request import Request
from vlmserve.scheduler.resources.checkpoints import (
    PlannedCheckpoints,
    cached_checkpoints,
    intervals,
    leader_of,
    prefix_key,
    ranked_boundaries,
)
from vlmserve.scheduler.resources.memory import Found, KVMemory, boundaries_of, num_reusable
from vlmserve.scheduler.resources.resource import Resource
from vlmserve.scheduler.state_slots import StateSlots
from vlmserve.steps import SchedulerOutput, StateCopy


class StateMemory(KVMemory):
    """Fills block tables, and gives each running request a slot for its state.

    A prefix is found where all blocks, the partly filled ones included, and a checkpoint of the state are cached.
    Requests leave checkpoints at boundaries of their prompts, where prompts part, and at even intervals. They end as
    checkpoints themselves.
    """

    def __init__(self, cache: PrefixCache, block_size: int, *, states: StatePool, **options: Any) -> None:
        super().__init__(cache, block_size, **{**options, "max_chunk": options["max_chunk"] + CHUNK})
        self.states = states
        self.planned = PlannedCheckpoints(block_size)
        spared = states.num_slots // 4 if self._prefix_caching else 0
        self._max_working = states.num_slots - spared
        self._num_working = 0
        self._copies: list[StateCopy] = []

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
        start = found.num_tokens
        return 2 * (self._awaited(request, found) - start) < len(request.token_ids) - start

    def _awaited(self, request: Request, found: Found) -> int:
        """Return how many tokens of a request a running request is going to leave a checkpoint after; 0: none."""
        leader, shared = leader_of(request, found.reach, self._computing, self._size)
        places = {*request.boundaries}
        if leader is not None and leader.state is not None:
            places.update(number for number in leader.state.leaving if number <= shared)
        places = {number for number in places if found.num_tokens < number <= num_reusable(request)}
        return max((n for n in places if prefix_key(request, n, self._size) in self.planned), default=0)

    def arrive(self, request: Request) -> None:
        """Have the running request that computes the same tokens leave a checkpoint where both part."""
        if not self._shares(request) or not self.states.spare_room:
            return
        leader, shared = leader_of(request, self._find(request).reach, self._computing, self._size)
        parting = shared // CHUNK * CHUNK
        if leader is None or leader.state is None:
            return
        if parting > leader.state.reached and parting not in leader.state.leaving:
            self.planned.add(leader, [parting])

    def _shares(self, request: Request) -> bool:
        """Return whether a request may read what others have computed."""
        return self._prefix_caching and num_reusable(request) > 0

    def _find(self, request: Request) -> Found:
        if not request.boundaries:
            request.boundaries = boundaries_of(request)
        pages = super()._find(request)
        reach = pages.reach if self._shares(request) else -1
        for num_tokens in cached_checkpoints(request, reach, self.states, self._size):
            full = num_tokens // self._size
            keys = request.chains[0]
            chain = Chain(pages.chains[0].keys[:full], request.tail_key(keys, num_tokens, self._size))
            hits, _ = self.cache.find([chain], self._columns)
            if hits[0].end == full and (chain.tail is None or hits[0].tail is not None):
                return Found([chain], hits, pages.reach, num_tokens, needs_tails=True)
        return pages.without_hits()

    def acquire(self, request: Request, running: Sequence[Request]) -> bool:
        if self.num_places <= 0 or not super().acquire(request, running):
            return False
        start, source = request.num_computed, NO_SLOT
        keys: list[bytes] = []
        if start:
            keys = [prefix_key(request, start, self._size)]
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
        wanted = ranked_boundaries(request)[: max(1, self.states.num_slots // 2)]
        state.kept = {*wanted[:1]}
        if (parting := found.reach * self._size // CHUNK * CHUNK) > start:
            # Prompts part there. What the state lacks there is computed once.
            wanted.append(parting)
            state.kept.add(parting)
        cuts = {*boundaries_of(request), *(span.start for span in request.image_spans), *wanted}
        state.cuts = sorted(cut for cut in cuts if start < cut < end)
        if not self._prefix_caching:
            return
        for key in request.keys_of_full_blocks(request.chains[0], end // self._size, self._size)[start // self._size :]:
            self._computing.setdefault(key, request)
        # Each of them keeps the blocks of a window.
        least = max([CHUNK, *(column.window for column in self._columns if column.window is not None)])
        between = intervals(request, start, self.states.spare_room // 2, least)
        self.planned.add(request, [place for place in sorted({*wanted, *between}) if start < place < end])
        if self._windowed:
            request.boundaries = request.boundaries | {*state.leaving}

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
            slot = None
            if key is not None and self.states.get(key) is None:
                slot = self.states.take(spare=cut not in state.kept)
            if slot is not None:
                state.planned.append((cut, slot))
                state.unsent.append((cut, slot))
            elif cut < end and cut % CHUNK:
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
            self.planned.drop(request, num_computed)
        super().advance(request, num_computed)

    def _register(self, request: Request, state: StateSlots, num_tokens: int, slot: int) -> None:
        """Register a checkpoint, and the partly filled blocks that belong to it."""
        key = prefix_key(request, num_tokens, self._size)
        full, extra = divmod(num_tokens, self._size)
        self.states.register(slot, key, request.chains[0].keys[full], extra)
        self._register_tail(request, num_tokens)
        state.keys.append(key)

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
            self.planned.drop(request)
            if state.slot != NO_SLOT:
                if self._prefix_caching and state.source == state.slot and state.reached == request.num_computed:
                    self._register(request, state, state.reached, state.slot)
                # The next turn comes without this answer's reasoning.
                self.states.release(state.slot, spare=request.thoughts is not None and not resumes)
                self._num_working -= 1
                for number in ranked_boundaries(request)[:1] if self._prefix_caching else ():
                    # The next turn begins with this checkpoint for sure, so it is evicted after the answer's.
                    self.states.touch(prefix_key(request, number, self._size))
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
