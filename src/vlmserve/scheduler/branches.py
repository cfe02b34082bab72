"""Scores continuations of a prompt, in requests that share its KV blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from vlmserve.scheduler.request import Request
from vlmserve.scheduler.searches import Search
from vlmserve.steps import ModelRunnerOutput
from vlmserve.tasks import Score, ScoreBranch, TaskResult
from vlmserve.types import EngineOutput


class Branches(Search):
    """Scores the first tokens of all continuations after the prompt, perhaps with the first branch as drafts. The rest
    of each follows in a branch.
    """

    def __init__(self, root: Request, task: Score) -> None:
        super().__init__(root)
        self._task: Final = task
        self._sums = [0.0] * len(task.continuations)
        self._unscored = task.branches
        self._places: dict[str, int] = {}
        self._root = root

    @property
    def drafts(self) -> Sequence[int]:
        return self._task.first_branch[:-1]

    def enter(self, request: Request, output: ModelRunnerOutput) -> bool:
        values = output.results[request.request_id].values()
        if request is self._root:
            count = len(self._sums)
            self._sums = [a + b for a, b in zip(self._sums, values[:count], strict=True)]
            if len(values) > count:
                self._sums[self._unscored.pop(0)] += sum(values[count:])
            return True
        self._sums[self._places[request.request_id]] += sum(values)
        if len(self.members) > 1:
            self.members.remove(request)
            return False
        return True

    @property
    def done(self) -> bool:
        return not self._unscored or self._root not in self.members

    def fork(self) -> list[tuple[Request, list[Request]]]:
        prompt_len = self._root.num_prompt_tokens
        self.members = []
        for place in self._unscored:
            first, *others, last = self._task.continuations[place]
            branch = self._root.fork(f"{self.request_id}#{place}", first, *others)
            branch.task = ScoreBranch(prompt_len + 1, last)
            branch.num_limited = len(branch.token_ids)  # computed in chunks, like a prompt
            self._places[branch.request_id] = place
            self.members.append(branch)
        return [(self._root, [*self.members])]

    def output(self) -> EngineOutput:
        result = TaskResult.of(self._sums)
        root = self._root
        cached, encoded = root.num_cached or 0, root.num_encoded
        return EngineOutput(
            self.request_id,
            [],
            "stop",
            cached_tokens=cached,
            images_encoded=encoded,
            result=result,
            missed=root.missed,
        )
