"""Runners of several ranks: rank 0 runs each step and samples, the others follow."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NoReturn, Protocol

import msgspec

from vlmserve.frames import Frames, pack
from vlmserve.layers.parallel import Ranks
from vlmserve.models.protocols import LoadedModel
from vlmserve.runner.kv import PoolSizes
from vlmserve.runner.requests import ScheduledRequest
from vlmserve.runner.runner import ModelRunner, Run, RunningStep
from vlmserve.sampling.guide import MakeMatcher
from vlmserve.steps import ModelRunnerOutput, NewRequest, SchedulerOutput
from vlmserve.types import Grammar, SamplingParams


class RankStep(msgspec.Struct, frozen=True):
    """A step for a rank that follows, without what only sampling needs.

    token_ids: what the step before sampled, by request.
    """

    step: SchedulerOutput
    token_ids: dict[str, list[int]]


class Followers(Protocol):
    """All ranks but 0, as that has them. ranks: for exchanges with them."""

    @property
    def ranks(self) -> Ranks: ...

    def send(self, frames: Frames) -> None:
        """Send a `RankStep` to all. Raises EngineDeadError if one has ended."""
        ...

    def explained(self) -> AbstractContextManager[None]:
        """What raises within it ends all ranks; where one of them had ended before, the error says so instead."""
        ...

    @property
    def watched(self) -> Sequence[int]:
        """Files that become readable when one of them has ended."""
        ...

    @property
    def silence(self) -> float:
        """Seconds without a heartbeat of one of them."""
        ...

    def check(self) -> None:
        """Raises EngineDeadError if one of them has ended."""
        ...


class LeadingRunner(ModelRunner):
    """The runner of rank 0, which sends each step to the others before it runs it."""

    def __init__(
        self,
        model: LoadedModel,
        sizes: PoolSizes,
        make_matcher: MakeMatcher,
        followers: Followers,
    ) -> None:
        super().__init__(model, sizes, make_matcher)
        self._followers = followers
        self._sampled: dict[str, list[int]] = {}

    def submit(self, step: SchedulerOutput) -> RunningStep:
        """See `ModelRunner.submit`. A step is to have ended before the next one is submitted."""
        new_requests = [_unsampled(request) for request in step.new_requests]
        message = RankStep(msgspec.structs.replace(step, new_requests=new_requests), self._sampled)
        self._followers.send(pack(message))
        running = super().submit(step)

        def finish() -> ModelRunnerOutput:
            with self._followers.explained():
                output = running.result()
            self._sampled = output.token_ids
            return output

        return RunningStep(finish)

    def collect(self, timeout: float) -> ModelRunnerOutput:
        """See `ModelRunner.collect`."""
        output = super().collect(timeout)
        self._sampled = {**self._sampled, **output.token_ids}
        return output


class FollowingRunner(ModelRunner):
    """The runner of another rank: it computes what rank 0 computes, and is told which tokens that samples."""

    def __init__(self, model: LoadedModel, sizes: PoolSizes) -> None:
        super().__init__(model, sizes, _no_matcher)

    def follow(self, message: RankStep) -> None:
        """Run a step to its end."""
        self.requests.append(message.token_ids)
        self.submit(message.step).result()

    def _draws_later(self, scheduled: list[ScheduledRequest]) -> bool:
        return False

    def _sample(self, run: Run, scheduled: list[ScheduledRequest], output: ModelRunnerOutput) -> None:
        """Nothing: rank 0 does."""


def _unsampled(request: NewRequest) -> NewRequest:
    """A request without what only sampling needs."""
    kept = SamplingParams(prompt_logprobs=request.params.prompt_logprobs)
    return msgspec.structs.replace(request, params=kept, thoughts=None)


def _no_matcher(grammar: Grammar, client: str) -> NoReturn:
    raise AssertionError("only rank 0 has grammars")
