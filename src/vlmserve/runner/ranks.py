"""Runners of several ranks: rank 0 samples, other ranks follow."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NoReturn, Protocol

import msgspec
import numpy as np

from vlmserve.cache.tiers import DiskTier
from vlmserve.frames import Frames, pack
from vlmserve.layers.parallel import Ranks
from vlmserve.models.protocols import LoadedModel
from vlmserve.runner.disk_loads import RankLoads
from vlmserve.runner.kv import PoolSizes
from vlmserve.runner.requests import ScheduledRequest
from vlmserve.runner.run import Run
from vlmserve.runner.runner import ModelRunner, RunningStep
from vlmserve.sampling.guide import MakeMatcher
from vlmserve.steps import DiskEntry, DiskStores, ModelRunnerOutput, NewRequest, SchedulerOutput
from vlmserve.types import Grammar, SamplingParams

_NO_CONTENT = np.empty(0, np.uint8)


class RankStep(msgspec.Struct, frozen=True):
    step: SchedulerOutput
    token_ids: dict[str, list[int]]
    """Tokens that the previous step sampled, by request."""


class RankMessage(msgspec.Struct, frozen=True):
    """Either a step, or entries to store on disk."""

    step: RankStep | None = None
    stores: DiskStores | None = None


class Followers(Protocol):
    @property
    def ranks(self) -> Ranks: ...

    def send(self, frames: Frames) -> None:
        """Send a `RankMessage`. Raises EngineDeadError if a rank has ended."""
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
        self._loads = RankLoads(followers.ranks, model.device.torch_device, None, reads=False)

    def submit(self, step: SchedulerOutput) -> RunningStep:
        """The previous step must have ended."""
        new_requests = [_unsampled(request) for request in step.new_requests]
        message = msgspec.structs.replace(
            step,
            new_requests=new_requests,
            block_contents=_without_contents(step.block_contents),
            state_contents=_without_contents(step.state_contents),
        )
        self._followers.send(pack(RankMessage(RankStep(message, self._sampled))))
        self._loads.begin(step.disk_loads)
        running = super().submit(step)

        def finish() -> ModelRunnerOutput:
            with self._followers.explained():
                output = running.result()
                output.disk_loads = self._loads.end(step)
            self._sampled = output.token_ids
            return output

        return RunningStep(finish)

    def keep(self, tier: DiskTier, stores: DiskStores) -> None:
        if tier.writes:  # else its shards are missing
            self._followers.send(pack(RankMessage(stores=stores)))
        super().keep(tier, stores)

    def collect(self, timeout: float) -> ModelRunnerOutput:
        output = super().collect(timeout)
        self._sampled = {**self._sampled, **output.token_ids}
        return output


class FollowingRunner(ModelRunner):
    """Computes the same steps; rank 0 sends the sampled tokens."""

    def __init__(self, model: LoadedModel, sizes: PoolSizes, ranks: Ranks, tier: DiskTier | None) -> None:
        """tier: None: no disk cache."""
        super().__init__(model, sizes, _no_matcher)
        self._tier = tier
        self._loads = RankLoads(ranks, model.device.torch_device, tier)

    def follow(self, message: RankMessage) -> None:
        if message.stores is not None and self._tier is not None:
            self.keep(self._tier, message.stores)
        if message.step is not None:
            self._run(message.step)

    def _run(self, message: RankStep) -> None:
        step = message.step
        self.requests.append(message.token_ids)
        self._loads.begin(step.disk_loads)
        step.block_contents = self._loads.own(step.block_contents)
        step.state_contents = self._loads.own(step.state_contents)
        self.submit(step).result()
        self._loads.end(step)

    def _draws_later(self, scheduled: list[ScheduledRequest]) -> bool:
        return False

    def _sample(self, run: Run, scheduled: list[ScheduledRequest], output: ModelRunnerOutput) -> None: ...


def _without_contents(entries: Sequence[DiskEntry]) -> list[DiskEntry]:
    return [DiskEntry(key, _NO_CONTENT) for key, _ in entries]


def _unsampled(request: NewRequest) -> NewRequest:
    kept = SamplingParams(prompt_logprobs=request.params.prompt_logprobs)
    return msgspec.structs.replace(request, params=kept, thoughts=None)


def _no_matcher(grammar: Grammar, client: str) -> NoReturn:
    raise AssertionError("only rank 0 has grammars")
