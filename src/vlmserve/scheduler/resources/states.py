"""KV blocks together with states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vlmserve.cache.prefix import PrefixCache
from vlmserve.cache.states import StatePool, restore, stored_key
from vlmserve.layer_specs import CHUNK, MAX_STATE_DRAFTS
from vlmserve.scheduler.request import Request
from vlmserve.scheduler.resources.checkpoints import intervals, places_to_store, prefix_keys, ranked_boundaries
from vlmserve.scheduler.resources.memory import boundaries_of
from vlmserve.scheduler.resources.resource import Resource
from vlmserve.scheduler.resources.state_hits import StateHits
from vlmserve.scheduler.state_slots import StateSlots
from vlmserve.scheduler.step_limits import StepLimits
from vlmserve.steps import BlockCopy, SchedulerOutput
from vlmserve.tasks import GENERATE


class StateMemory(StateHits):
    """Block tables, and a state slot per pass.

    Requests leave checkpoints at boundaries of prompts, where prompts part, at even intervals, and at their end.
    """

    def __init__(
        self, cache: PrefixCache, block_size: int, *, states: StatePool, draft_places: int = 0, **options: Any
    ) -> None:
        """draft_places: requests that may have drafts at once."""
        super().__init__(cache, block_size, states=states, **options)
        self.draft_places = [*range(draft_places)]
        """Free places."""
        spared = states.num_slots // 4 if self._prefix_caching else 0
        self._max_working = states.num_slots - spared
        self._num_working = 0
        # checkpoints that a step in flight writes, by request
        self._unproven: dict[str, list[bytes]] = {}
        self.state_stores: list[tuple[int, bytes]] = []
        """New checkpoints and their keys, to store on disk if `stores` is not None."""

    @property
    def num_places(self) -> int:
        """Without slots for checkpoints."""
        return min(self._max_working - self._num_working, self.states.num_free)

    def begin_step(self, running: Sequence[Request], limits: StepLimits | None) -> None:
        self._unproven.clear()  # no step is in flight

    def end_step(self, step: SchedulerOutput) -> None:
        super().end_step(step)
        step.state_copies, self.states.copies = self.states.copies, []
        step.state_contents, self.states.contents = self.states.contents, []

    def acquire(self, request: Request, running: Sequence[Request]) -> bool:
        if self.num_places < len(request.chains) or not super().acquire(request, running):
            return False
        start = request.num_computed
        keys = prefix_keys(request, start, self._size) if start else []
        full, extra = divmod(start, self._size)
        restore(self.states, keys, [chain.keys[full] for chain in request.chains] if keys else [], extra)
        slots, sources = self.states.begin(keys, len(request.chains))
        request.state = state = StateSlots(slots, sources, start)
        state.held = [slot for slot in sources if slot not in slots]
        state.keys = keys
        self._num_working += len(slots)
        self._plan_checkpoints(request, state)
        return True

    def _plan_checkpoints(self, request: Request, state: StateSlots) -> None:
        start, end = state.reached, request.num_prompt_tokens
        _, found = self._found
        wanted = ranked_boundaries(request)[: max(1, self.states.num_slots // 2)]
        state.kept = {*wanted[:1]}
        if (parting := found.reach * self._size // CHUNK * CHUNK) > start:
            # the missing part of the state is computed once
            wanted.append(parting)
            state.kept.add(parting)
        cuts = {*boundaries_of(request), *(span.start for span in request.image_spans), *wanted}
        state.cuts = sorted(cut for cut in cuts if start < cut < end)
        if not self._prefix_caching:
            return
        for key in request.keys_of_full_blocks(request.chains[0], end // self._size, self._size)[start // self._size :]:
            self.computing.setdefault(key, request)
        # each checkpoint keeps a window's blocks
        least = max([CHUNK, *(column.window for column in self.columns if column.window is not None)])
        between = intervals(request, start, self.states.spare_room // 2, least)
        self.planned.add(request, [place for place in sorted({*wanted, *between}) if start < place < end])
        if self._windowed:
            request.boundaries = request.boundaries | {*state.leaving}

    def grow(self, request: Request, num_tokens: int, spare: Sequence[Request] = ()) -> int:
        reach, most = num_tokens, max(1, request.num_uncomputed)
        if num_tokens > most:
            most += self._room_of_drafts(request)
        if 0 < num_tokens < request.num_uncomputed:
            reach = max(num_tokens, _next_end(request, request.num_computed) - request.num_computed)
        return min(super().grow(request, reach, spare), num_tokens, most)

    def _room_of_drafts(self, request: Request) -> int:
        """States do not go back, so drafts are kept beside them until the next step."""
        state = request.state
        assert state is not None
        if request.num_uncomputed > 1 or len(state.slots) > 1 or request.task != GENERATE:
            return 0
        if state.draft_place is None and self.draft_places:
            state.draft_place = self.draft_places.pop()
        return 0 if state.draft_place is None else MAX_STATE_DRAFTS

    def extend(self, request: Request, start: int, end: int) -> int:
        return end if self.limit(request, start, end) > start else _next_end(request, start)

    def limit(self, request: Request, start: int, end: int) -> int:
        assert request.state is not None
        end = super().limit(request, start, end)
        return end if end >= len(request.token_ids) else max(start, request.state.last_cut(end))

    def settle(self, step: SchedulerOutput, request: Request, start: int, end: int, wanted: int) -> None:
        state = request.state
        assert state is not None
        for cut in state.cuts_between(start, end):
            slots: Sequence[int] = ()
            if cut in state.leaving and None in map(self.states.get, prefix_keys(request, cut, self._size)):
                slots = self.states.take(len(state.slots), spare=cut not in state.kept)
            if slots:
                state.planned.append((cut, slots))
                state.unsent.append((cut, slots))
            elif cut < end and cut % CHUNK:
                state.unsent.append((cut, state.slots))

    def advance(self, request: Request, num_computed: int) -> None:
        """Register checkpoints before blocks are freed."""
        state = request.state  # preempted before its token came
        if state is not None and state.held:
            for slot in state.held:
                self.states.release(slot)
            state.held = []
        if state is not None and state.draft_place is not None:
            # a step in flight reaches further
            state.accepted = max(0, num_computed - state.reached)
            if not state.accepted:
                self._free_draft_place(state)
        if state is not None and state.leaving:
            stored = set[int]() if self.stores is None or not state.planned else places_to_store(request)
            for num_tokens, slots in state.planned:
                self._register(request, state, num_tokens, slots)
                if num_tokens in stored:
                    keys = prefix_keys(request, num_tokens, self._size)
                    self.state_stores += [(slot, stored_key(key)) for slot, key in zip(slots, keys, strict=True)]
                    self._register_tail(request, num_tokens, stores=self.stores)
                for slot in slots:
                    self.states.release(slot, spare=num_tokens not in state.kept)
            state.planned = []
            self.planned.drop(request, num_computed)
        super().advance(request, num_computed)

    def _free_draft_place(self, state: StateSlots) -> None:
        if state.draft_place is not None:
            self.draft_places.append(state.draft_place)
            state.draft_place = None

    def _register(self, request: Request, state: StateSlots, num_tokens: int, slots: Sequence[int]) -> None:
        keys = prefix_keys(request, num_tokens, self._size)
        full, extra = divmod(num_tokens, self._size)
        for chain, key, slot in zip(request.chains, keys, slots, strict=True):
            self.states.register(slot, key, chain.keys[full], extra)
        self._register_tail(request, num_tokens)
        state.keys += keys

    def _leave_last(self, request: Request, state: StateSlots) -> None:
        """A step in flight may add the last token. Accepted drafts may not be in the states yet."""
        num_known, ahead = len(request.token_ids), state.reached - request.num_computed
        if state.reached > num_known and request.stop_token_id is not None:
            request.token_ids.append(request.stop_token_id)
        if ahead <= 1 and state.reached <= len(request.token_ids):
            if ahead > 0:
                start, end = request.num_computed // self._size, state.reached // self._size
                self._register_full(request, start, end, is_proven=False)
                self._unproven[request.request_id] = prefix_keys(request, state.reached, self._size)
            # a small window may end after the states, which accepted drafts do not change
            if all(table.first <= state.reached // self._size for table in request.tables):
                self._register(request, state, state.reached, state.slots)
        del request.token_ids[num_known:]

    def lose(self, request_ids: Iterable[str]) -> None:
        """Forget checkpoints of requests that failed in their last step."""
        for key in [key for name in request_ids for key in self._unproven.pop(name, ())]:
            self.states.forget(key)
            blocks = [self.cache.forget(column.key(key)) for column in self.columns]
            self._not_finite += [block for block in blocks if block is not None and self.pool.ref_count(block) == 0]

    def fork(self, parent: Request, child: Request, *, first: bool) -> bool:
        state = parent.state
        assert state is not None
        if not super().fork(parent, child, first=first):
            return False
        if first:
            slots, state.slots = state.slots, []
        else:
            slots = self.states.take(len(state.sources)) if self.num_places >= len(state.sources) else []
            if not slots:
                return False
            copies = zip(state.sources, slots, strict=True)
            self.states.copies += [BlockCopy("copy", source, slot) for source, slot in copies]
            self._num_working += len(slots)
        child.state = StateSlots(slots, slots, state.reached)
        return True

    def undo(self, request: Request) -> None:
        """Working states that may have changed do not become checkpoints."""
        if request.state is not None:
            request.state.sources = []

    def discard(self, request: Request, *, out_of_memory: bool) -> None:
        super().discard(request, out_of_memory=out_of_memory)
        self.undo(request)
        keys = () if request.state is None else request.state.keys
        self.forgotten += [stored_key(key) for key in keys if self.stores is not None]
        for key in keys:
            self.states.forget(key)

    def release(self, request: Request, *, resumes: bool = False) -> None:
        state = request.state
        if state is not None:
            self._free_draft_place(state)
            for slot in [*state.held, *(slot for _, slots in state.planned for slot in slots)]:
                self.states.release(slot)
            self.planned.drop(request)
            if state.slots:
                if self._prefix_caching and state.sources == state.slots:
                    self._leave_last(request, state)
                for slot in state.slots:
                    # the next turn does not contain this answer's reasoning
                    self.states.release(slot, spare=request.thoughts is not None and not resumes)
                self._num_working -= len(state.slots)
                for number in ranked_boundaries(request)[:1] if self._prefix_caching else ():
                    for key in prefix_keys(request, number, self._size):
                        # the next turn begins with it
                        self.states.touch(key)
        super().release(request, resumes=resumes)


class StatePlaces(Resource):
    """A resource, so that lower priorities give slots up."""

    def __init__(self, memory: StateMemory) -> None:
        self._memory = memory

    def missing(self, request: Request) -> int:
        return len(request.chains)

    def room(self, running: Sequence[Request]) -> int:
        return self._memory.num_places


def _next_end(request: Request, start: int) -> int:
    assert request.state is not None
    return min(len(request.token_ids), request.state.next_cut(start))
