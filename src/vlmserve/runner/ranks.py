"""Runners of several ranks: rank 0 samples, other ranks follow."""

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
    step: SchedulerOutput
    token_ids: dict[str, list[int]]
    """Tokens that the previous step sampled, by request."""


class Followers(Protocol):
    @property
    def ranks(self) -> Ranks: ...

    def send(self, frames: Frames) -> None:
        """Send a `RankStep`. Raises EngineDeadError if a rank has ended."""
        ...

    def explained(self) -> AbstractContextManager[None]:
        """End all ranks on an error. If a rank ended first, the error says so."""
        ...

    @property
    def watched(self) -> Sequence[int]:
        """Files that become readable when a rank ends."""
        ...

    @property
    def silence(self) -> float:
        """Seconds since the last heartbeat of the quietest rank."""
        ...

    def check(self) -> None: ...


class LeadingRunner(ModelRunner):
    """Sends each step to the other ranks, then runs it."""

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
        """The previous step must have ended."""
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
        output = super().collect(timeout)
        self._sampled = {**self._sampled, **output.token_ids}
        return output


class FollowingRunner(ModelRunner):
    """Computes the same steps; rank 0 sends the sampled tokens."""

    def __init__(self, model: LoadedModel, sizes: PoolSizes) -> None:
        super().__init__(model, sizes, _no_matcher)

    def follow(self, message: RankStep) -> None:
        self.requests.append(message.token_ids)
        self.submit(message.step).result()

    def _draws_later(self, scheduled: list[ScheduledRequest]) -> bool:
        return False

    def _sample(self, run: Run, scheduled: list[ScheduledRequest], output: ModelRunnerOutput) -> None: ...


def _unsampled(request: NewRequest) -> NewRequest:
    kept = SamplingParams(prompt_logprobs=request.params.prompt_logprobs)
    return msgspec.structs.replace(request, params=kept, thoughts=None)


def _no_matcher(grammar: Grammar, client: str) -> NoReturn:
    raise AssertionError("only rank 0 has grammars")
