from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from vlmserve.scheduler.policy import enter_first, enter_last, reserved_tokens, take_victim
from vlmserve.scheduler.request import Request
from vlmserve.scheduler.resources.resource import Resources
from vlmserve.scheduler.searches import Search


class Queues:
    """Only running requests hold resources."""

    def __init__(self, resources: Resources, max_num_seqs: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.requests: dict[str, Request] = {}
        self.searches: dict[str, Search] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        """Ordered by priority and admission."""
        self.num_preemptions = 0
        self._resources = resources
        # not yet dropped by the runner
        self._finished: list[str] = []

    def known_to_runner(self, request_id: str) -> Request | None:
        """A new request may reuse an ended one's id."""
        request = self.requests.get(request_id)
        return request if request is not None and request.known_to_runner else None

    @property
    def only_beams_run(self) -> bool:
        """Others without tokens wait for their grammars."""
        return bool(self.running) and all(request.answer_id in self.searches for request in self.running)

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        enter_last(self.waiting, request)

    def admit(self, request: Request) -> bool:
        if not self._resources.acquire(request, self.running):
            return False
        enter_last(self.running, request)
        return True

    def chunk_budget(self, request: Request, budget: int) -> int:
        may_run = islice(self.waiting, max(0, self.max_num_seqs - len(self.running)))
        return budget - reserved_tokens(request, self.running, may_run, budget)

    def preempt(self) -> Request:
        """It waits again, unless it is a beam that waits for others."""
        victim = take_victim(self.running)
        waits_for_others = victim.num_uncomputed == 0 and victim.answer_id in self.searches
        self._resources.release(victim, resumes=victim.num_uncomputed <= 1)
        self.num_preemptions += 1
        if not waits_for_others:
            enter_first(self.waiting, victim)
        return victim

    def recompute_if_long(self, request: Request, length: int) -> None:
        """A request of `length` tokens may now exceed `max_short_len`."""
        limit = request.max_short_len
        if limit is None or not length <= limit < len(request.token_ids):
            return
        self._resources.release(request)
        request.reset_block_keys()
        self._wait_again(request)

    def undo(self, request: Request) -> None:
        self._resources.undo(request)
        self._resources.release(request)
        self._wait_again(request)

    def _wait_again(self, request: Request) -> None:
        if request in self.running:
            self.running.remove(request)
            enter_first(self.waiting, request)

    def fork(self, parent: Request, children: list[Request]) -> None:
        """Children without room wait."""
        place = self.running.index(parent) if parent in self.running else None
        waits = False
        for number, child in enumerate(children):
            self.requests[child.request_id] = child
            has_place = len(self.running) <= self.max_num_seqs  # the parent leaves its place
            if place is not None and has_place and self._resources.fork(parent, child, first=number == 0):
                self.running.insert(place + number, child)
            else:
                enter_first(self.waiting, child)
                waits = True
            self.recompute_if_long(child, len(parent.token_ids))
        self.remove(parent, resumes=waits)

    def remove(self, request: Request, *, resumes: bool = False) -> None:
        self._resources.release(request, resumes=resumes)
        del self.requests[request.request_id]
        if request.known_to_runner:
            self._finished.append(request.request_id)
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)

    def end_search(self, search: Search) -> None:
        for member in search.members:
            self.remove(member)
        del self.searches[search.request_id]

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if (search := self.searches.get(request_id)) is not None:
                self.end_search(search)
            elif (request := self.requests.get(request_id)) is not None:
                self.remove(request)

    def take_finished(self) -> list[str]:
        finished, self._finished = self._finished, []
        return finished
