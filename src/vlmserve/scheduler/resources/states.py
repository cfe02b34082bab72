"""KV blocks together with states: where both are cached, what a request takes, and the checkpoints that it leaves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vlmserve.cache.prefix import PrefixCache
from vlmserve.cache.states import StatePool
from vlmserve.layer_specs import CHUNK, NO_SLOT
from vlmserve.scheduler.request import Request
from vlmserve.scheduler.resources.checkpoints import intervals, prefix_key, ranked_boundaries
from vlmserve.scheduler.resources.memory import boundaries_of
from vlmserve.scheduler.resources.resource import Resource
from vlmserve.scheduler.resources.state_hits import StateHits
from vlmserve.scheduler.state_slots import StateSlots
from vlmserve.scheduler.step_limits import StepLimits
from vlmserve.steps import SchedulerOutput, StateCopy


class StateMemory(StateHits):
    """Fills block tables, and gives each running request a slot for its state.

    Requests leave checkpoints at boundaries of their prompts, where prompts part, and at even intervals. They end as
    checkpoints themselves.
    """

    def __init__(self, cache: PrefixCache, block_size: int, *, states: StatePool, **options: Any) -> None:
        super().__init__(cache, block_size, states=states, **options)
        spared = states.num_slots // 4 if self._prefix_caching else 0
        self._max_working = states.num_slots - spared
        self._num_working = 0
        self._copies: list[StateCopy] = []
        # By the request that has left it, the key of a checkpoint that a step in flight writes.
        self._unproven: dict[str, bytes] = {}

    @property
    def num_places(self) -> int:
        """Requests that may start. Some slots are kept for checkpoints."""
        return min(self._max_working - self._num_working, self.states.num_free)

    def begin_step(self, running: Sequence[Request], limits: StepLimits | None) -> None:
        self._unproven.clear()  # No step is in flight.

    def end_step(self, step: SchedulerOutput) -> None:
        super().end_step(step)
        step.state_copies, self._copies = self._copies, []

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

    def _leave_last(self, request: Request, state: StateSlots) -> None:
        """Make the working state a checkpoint. A step in flight may add the answer's last token, which is known."""
        num_known, ahead = len(request.token_ids), state.reached - request.num_computed
        if state.reached > num_known and request.stop_token_id is not None:
            request.token_ids.append(request.stop_token_id)
        if ahead <= 1 and state.reached <= len(request.token_ids):
            if ahead:
                self._register_full(request, request.num_computed // self._size, state.reached // self._size)
                self._unproven[request.request_id] = prefix_key(request, state.reached, self._size)
            self._register(request, state, state.reached, state.slot)
        del request.token_ids[num_known:]

    def lose(self, request_ids: Iterable[str]) -> None:
        """Forget the last checkpoints of requests that ended while a step was in flight, which has failed for them."""
        for key in [self._unproven.pop(name) for name in request_ids if name in self._unproven]:
            self.states.forget(key)
            blocks = [self.cache.forget(column.key(key)) for column in self._columns]
            self._not_finite += [block for block in blocks if block is not None and self.pool.ref_count(block) == 0]

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
        """Take back slots. The working state becomes a checkpoint."""
        state = request.state
        if state is not None:
            for slot in [slot for _, slot in state.planned] + [state.held] * (state.held != NO_SLOT):
                self.states.release(slot)
            self.planned.drop(request)
            if state.slot != NO_SLOT:
                if self._prefix_caching and state.source == state.slot:
                    self._leave_last(request, state)
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
