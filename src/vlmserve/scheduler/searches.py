"""Answers that several requests compute together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from vlmserve.scheduler.beams import Beams, Choices
from vlmserve.scheduler.request import Request
from vlmserve.steps import ModelRunnerOutput
from vlmserve.types import EngineOutput


class Search(ABC):
    """request_id: of the original request. members: the requests that compute or wait."""

    def __init__(self, root: Request) -> None:
        self.request_id = root.request_id
        self.members = [root]

    @property
    def drafts(self) -> Sequence[int]:
        """For the step that ends the prompt."""
        return ()

    @abstractmethod
    def enter(self, request: Request, output: ModelRunnerOutput) -> bool:
        """Returns whether the search has advanced."""

    @property
    @abstractmethod
    def done(self) -> bool: ...

    @abstractmethod
    def output(self) -> EngineOutput: ...

    @abstractmethod
    def fork(self) -> list[tuple[Request, list[Request]]]:
        """Returns each old member with its extensions."""


class BeamMembers(Search):
    def __init__(self, root: Request, beams: Beams) -> None:
        super().__init__(root)
        self._beams = beams
        self._choices: dict[str, Choices] = {}
        self._num_forked = 0

    def enter(self, request: Request, output: ModelRunnerOutput) -> bool:
        self._choices[request.request_id] = output.logprobs[request.request_id][0].top
        if len(self._choices) < len(self.members):
            return False
        self._beams.advance([self._choices[member.request_id] for member in self.members])
        self._choices = {}
        return True

    @property
    def done(self) -> bool:
        return self._beams.done

    def output(self) -> EngineOutput:
        first = self.members[0]
        return self._beams.output(self.request_id, first.num_cached or 0, first.num_encoded, first.missed)

    def fork(self) -> list[tuple[Request, list[Request]]]:
        forks: list[tuple[Request, list[Request]]] = [(member, []) for member in self.members]
        self.members = []
        for beam in self._beams.running:
            parent, children = forks[beam.parent]
            self._num_forked += 1
            children.append(parent.fork(f"{self.request_id}#{self._num_forked}", beam.token_ids[-1]))
            self.members.append(children[-1])
        return forks
