"""Beam searches of the scheduler: each beam is a request, and those that go on take over or share KV blocks."""

from __future__ import annotations

from vlmserve.scheduler.beams import Beams, Choices
from vlmserve.scheduler.request import Request
from vlmserve.types import EngineOutput


class Search:
    """One search. request_id: of whoever asked for it. members: a request for each running beam, in their order."""

    def __init__(self, root: Request, beams: Beams) -> None:
        self.request_id = root.request_id
        self.members = [root]
        self._beams = beams
        self._choices: dict[str, Choices] = {}
        self._num_forked = 0

    def enter(self, request: Request, choices: Choices) -> bool:
        """What may follow on a member. Returns whether all members have their choices; then the search has gone on."""
        self._choices[request.request_id] = choices
        if len(self._choices) < len(self.members):
            return False
        self._beams.advance([self._choices[member.request_id] for member in self.members])
        self._choices = {}
        return True

    @property
    def done(self) -> bool:
        return self._beams.done

    def output(self) -> EngineOutput:
        """The answers of a search that is done."""
        first = self.members[0]
        return self._beams.output(self.request_id, first.num_cached or 0, first.num_encoded)

    def fork(self) -> list[tuple[Request, list[Request]]]:
        """Make the members that go on. Returns each old one with those that extend it."""
        forks: list[tuple[Request, list[Request]]] = [(member, []) for member in self.members]
        self.members = []
        for beam in self._beams.running:
            parent, children = forks[beam.parent]
            self._num_forked += 1
            children.append(parent.fork(f"{self.request_id}#{self._num_forked}", beam.token_ids[-1]))
            self.members.append(children[-1])
        return forks
