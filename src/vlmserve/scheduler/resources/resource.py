"""The interface of resources that requests hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from vlmserve.scheduler.request import Request
from vlmserve.scheduler.step_limits import StepLimits
from vlmserve.steps import RequestFailure, SchedulerOutput


class Failed(NamedTuple):
    request: Request
    reason: str
    param: str


class Resource:
    """By default it never runs out."""

    in_decodes = False
    """True if `grow` and `advance` are also called for decodes."""

    def begin_step(self, running: Sequence[Request], limits: StepLimits | None) -> None:
        """Also called when a step is planned again."""

    def end_step(self, step: SchedulerOutput) -> None:
        """Add the runner's work. Steps without work do not run."""

    def arrive(self, request: Request) -> None:
        """A request begins to wait."""

    def ready(self, request: Request) -> bool:
        """Others overtake requests that are not ready."""
        return True

    def num_found(self, request: Request) -> int:
        return 0

    def missing(self, request: Request) -> int:
        return 0

    def room(self, running: Sequence[Request]) -> int:
        """Units free after the running requests' next step."""
        return 0

    def acquire(self, request: Request, running: Sequence[Request]) -> bool:
        """Take what a `ready` request needs to start, and leave what `running` may need soon.

        Returns False, taking nothing, without room. Then no request overtakes it.
        """
        return True

    def grow(self, request: Request, num_tokens: int, spare: Sequence[Request] = ()) -> int:
        """Take what the next tokens need, and leave what `spare` may need soon.

        Returns how many tokens have room. If 0, a decode preempts another request.
        """
        return num_tokens

    def extend(self, request: Request, start: int, end: int) -> int:
        """Return `end`, or the earliest allowed end of a chunk."""
        return end

    def limit(self, request: Request, start: int, end: int) -> int:
        """Return where chunk ``start <= i < end`` must end; `start`: it waits. Changes nothing."""
        return end

    def settle(self, step: SchedulerOutput, request: Request, start: int, end: int, wanted: int) -> None:
        """Take what chunk ``start <= i < end`` needs.

        wanted: its end without this resource, which may prepare up to there.
        """

    def advance(self, request: Request, num_computed: int) -> None:
        """Tokens ``request.num_computed <= i < num_computed`` are computed."""

    def may_plan_ahead(self, following: Sequence[tuple[Request, int]]) -> bool:
        """Return whether `grow` has room."""
        return True

    def fork(self, parent: Request, child: Request, *, first: bool) -> bool:
        """Let a child replace its beam. first: it takes over what siblings copy. Returns False without room."""
        return True

    def undo(self, request: Request) -> None:
        """An unfinished step may have changed what a request holds."""

    def release(self, request: Request, *, resumes: bool = False) -> None:
        """resumes: computed tokens are needed again soon."""

    def discard(self, request: Request, *, out_of_memory: bool) -> None:
        """Drop what a failed request computed. out_of_memory: also what may be missing."""

    def failed(self, waiting: Iterable[Request]) -> list[Failed]:
        return []

    def wait(self, seconds: float) -> bool:
        """Return False immediately if nothing is in progress."""
        return False


class Resources:
    """Asked in order, released in reverse: the last is the scarcest, and the most expensive to ask."""

    def __init__(self, resources: Sequence[Resource]) -> None:
        self._all = tuple(resources)
        self._in_decodes = tuple(one for one in resources if one.in_decodes)
        self._growing, self._extending, self._limiting, self._settling, self._failing = (
            _overriding(resources, name) for name in ("grow", "extend", "limit", "settle", "failed")
        )
        # called for each token
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
        for one in self._growing:
            num_tokens = one.grow(request, num_tokens, spare)
        return num_tokens

    def cut(self, step: SchedulerOutput, request: Request, start: int, end: int) -> int:
        """Return where chunk ``start <= i < end`` ends, and take what it needs.

        Bidirectional spans are never split, even beyond the budget. A chunk may begin inside a span that is partly
        cached.
        """
        if (span := request.bidirectional_span_at(end)) is not None:
            end = span[0] if span[0] > start else span[1]
        for one in self._extending:
            end = one.extend(request, start, end)
        limits = found = [one.limit(request, start, end) for one in self._limiting]
        cut = end
        while (shortest := min(found)) < cut:
            span = request.bidirectional_span_at(shortest)
            cut = max(start, shortest if span is None else span[0])
            found = [one.limit(request, start, cut) for one in self._limiting] if cut > start else [start]
        for one in self._settling:
            others = [limit for other, limit in zip(self._limiting, limits, strict=True) if other is not one]
            one.settle(step, request, start, cut, min([end, *others]))
        return cut

    def advance(self, request: Request, num_computed: int) -> None:
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
        for one in self._all if failure is not None and failure.kind != "grammar" else ():
            one.discard(request, out_of_memory=failure is not None and failure.kind == "out_of_memory")

    def failed(self, waiting: Iterable[Request]) -> list[Failed]:
        return [failed for one in self._failing for failed in one.failed(waiting)]

    def wait(self, seconds: float) -> bool:
        return any(one.wait(seconds) for one in self._all)


def _overriding(resources: Sequence[Resource], name: str) -> tuple[Resource, ...]:
    return tuple(one for one in resources if getattr(type(one), name) is not getattr(Resource, name))
