"""The questions that the scheduler asks about what a request needs, whatever it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from vlmserve.scheduler.request import Request
from vlmserve.scheduler.step_limits import StepLimits
from vlmserve.steps import RequestFailure, SchedulerOutput


class Failed(NamedTuple):
    """A waiting request that can never run."""

    request: Request
    reason: str
    param: str
    """The field of the request that caused it."""


class Resource:
    """Something that requests hold. By default it never runs out."""

    in_decodes = False
    """True if `grow` and `advance` are called for decodes, too."""
    may_fail = False
    """True if `failed` is called."""

    def begin_step(self, running: Sequence[Request], limits: StepLimits | None) -> None:
        """Plan a step, or plan it again after a preemption."""

    def end_step(self, step: SchedulerOutput) -> None:
        """Add to a planned step what the runner has to do. A step without work does not run."""

    def arrive(self, request: Request) -> None:
        """Note that a request begins to wait."""

    def ready(self, request: Request) -> bool:
        """Return whether a waiting request may start. If not, it waits, and others overtake it."""
        return True

    def num_found(self, request: Request) -> int:
        """Return how many leading tokens of a waiting request, which has just been found `ready`, are computed."""
        return 0

    def missing(self, request: Request) -> int:
        """Return how many units a waiting request takes that has just been found `ready`."""
        return 0

    def room(self, running: Sequence[Request]) -> int:
        """Return how many units are free after the next step of running requests."""
        return 0

    def acquire(self, request: Request, running: Sequence[Request]) -> bool:
        """Take what a request needs to start that has just been found `ready`.

        Leave what `running` may need soon. Return False, taking nothing, if there is no room. No request overtakes it.
        """
        return True

    def grow(self, request: Request, num_tokens: int, spare: Sequence[Request] = ()) -> int:
        """Take what the next `num_tokens` tokens of a running request need. Leave what `spare` may need soon.

        Return how many of the tokens have room. At 0, a decode preempts another request.
        """
        return num_tokens

    def extend(self, request: Request, start: int, end: int) -> int:
        """Return `end`, or where a chunk ends at least that can only end at some places."""
        return end

    def limit(self, request: Request, start: int, end: int) -> int:
        """Return where a chunk ``start <= i < end`` has to end; `start`: the request waits. Changes nothing."""
        return end

    def settle(self, step: SchedulerOutput, request: Request, start: int, end: int, wanted: int) -> None:
        """Take what the chunk ``start <= i < end`` needs, once all limits are known.

        wanted: where it would end but for this resource, which may prepare what it lacks up to there.
        """

    def advance(self, request: Request, num_computed: int) -> None:
        """Note that tokens ``request.num_computed <= i < num_computed`` are computed."""

    def may_plan_ahead(self, following: Sequence[tuple[Request, int]]) -> bool:
        """Return whether `grow` has room for these requests and numbers of tokens together."""
        return True

    def fork(self, parent: Request, child: Request, *, first: bool) -> bool:
        """Let a child of a beam run in its place. first: it takes over what its siblings copy. False: no room."""
        return True

    def undo(self, request: Request) -> None:
        """Note that a step which did not end may have changed what a request holds."""

    def release(self, request: Request, *, resumes: bool = False) -> None:
        """Take back what a request holds, if anything. resumes: its computed tokens are needed again soon."""

    def discard(self, request: Request, *, out_of_memory: bool) -> None:
        """Drop what a failed request has computed, and with `out_of_memory` all that may not have been computed."""

    def failed(self, waiting: Iterable[Request]) -> list[Failed]:
        """Return the waiting requests that can never be ready."""
        return []

    def wait(self, seconds: float) -> bool:
        """Wait until a request may have become ready. Return False at once if none will."""
        return False


class Resources:
    """All resources. They are asked in order and taken in reverse order: the last one is the scarcest, and it is the
    most work to say whether it is ready."""

    def __init__(self, resources: Sequence[Resource]) -> None:
        self._all = tuple(resources)
        self._in_decodes = tuple(one for one in resources if one.in_decodes)
        self._failing = tuple(one for one in resources if one.may_fail)
        # Most schedulers have a single one, which is asked directly, because it is asked for each token.
        single = len(self._in_decodes) == 1
        self.grow_decode: Callable[[Request, int], int] = self._in_decodes[0].grow if single else self._grow_decode

    def begin_step(self, running: Sequence[Request], limits: StepLimits | None) -> None:
        for one in self._all:
            one.begin_step(running, limits)

    def end_step(self, step: SchedulerOutput) -> None:
        for one in self._all:
            one.end_step(step)

    def arrive(self, request: Request) -> None:
        for one in self._all:
            one.arrive(request)

    def ready(self, request: Request) -> bool:
        return all(one.ready(request) for one in self._all)

    def num_found(self, request: Request) -> int:
        return max(one.num_found(request) for one in self._all)

    def missing(self, request: Request) -> list[int]:
        return [one.missing(request) for one in self._all]

    def have_room(self, wanted: Sequence[int], running: Sequence[Request]) -> bool:
        """Return whether each has `wanted` units left after the next step of running requests."""
        return all(units <= one.room(running) for units, one in zip(wanted, self._all, strict=True))

    def acquire(self, request: Request, running: Sequence[Request]) -> bool:
        for place in reversed(range(len(self._all))):
            if not self._all[place].acquire(request, running):
                for taken in self._all[place + 1 :]:
                    taken.release(request)
                return False
        return True

    def _grow_decode(self, request: Request, num_tokens: int) -> int:
        return min([num_tokens, *(one.grow(request, num_tokens) for one in self._in_decodes)])

    def grow(self, request: Request, num_tokens: int, spare: Sequence[Request] = ()) -> int:
        for one in self._all:
            num_tokens = one.grow(request, num_tokens, spare)
        return num_tokens

    def cut(self, step: SchedulerOutput, request: Request, start: int, end: int) -> int:
        """Return where a chunk ``start <= i < end`` really ends, and take what it needs.

        A bidirectional span is never cut: the chunk ends before it, or with it if the chunk begins with it. That may
        exceed the budget, as `Resource.extend` may. A chunk may begin inside a span whose first tokens were found in
        the prefix cache.
        """
        if (span := request.bidirectional_span_at(end)) is not None:
            end = span[0] if span[0] > start else span[1]
        for one in self._all:
            end = one.extend(request, start, end)
        limits = found = [one.limit(request, start, end) for one in self._all]
        cut = end
        while (shortest := min(found)) < cut:
            span = request.bidirectional_span_at(shortest)
            cut = max(start, shortest if span is None else span[0])
            found = [one.limit(request, start, cut) for one in self._all]
        for number, one in enumerate(self._all):
            one.settle(step, request, start, cut, min([end, *limits[:number], *limits[number + 1 :]]))
        return cut

    def advance(self, request: Request, num_computed: int) -> None:
        """Note that a request's first `num_computed` tokens are computed."""
        for one in self._all if request.num_computed < request.num_limited else self._in_decodes:
            one.advance(request, num_computed)
        request.num_computed = num_computed

    def may_plan_ahead(self, following: Sequence[tuple[Request, int]]) -> bool:
        return all(one.may_plan_ahead(following) for one in self._all)

    def fork(self, parent: Request, child: Request, *, first: bool) -> bool:
        if all(one.fork(parent, child, first=first) for one in self._all):
            return True
        self.release(child)
        return False

    def release(self, request: Request, *, resumes: bool = False) -> None:
        for one in self._all:
            one.release(request, resumes=resumes)

    def undo(self, request: Request) -> None:
        for one in self._all:
            one.undo(request)

    def discard(self, request: Request, failure: RequestFailure | None) -> None:
        """Drop what a request has computed if the computation failed."""
        for one in self._all if failure is not None and failure.kind != "grammar" else ():
            one.discard(request, out_of_memory=failure is not None and failure.kind == "out_of_memory")

    def failed(self, waiting: Iterable[Request]) -> list[Failed]:
        return [failed for one in self._failing for failed in one.failed(waiting)]

    def wait(self, seconds: float) -> bool:
        return any(one.wait(seconds) for one in self._all)
