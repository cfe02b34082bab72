"""Ranks other than 0 as threads of the tests' process, where everything is imported already.

They load their part of the model and get their steps as messages, as processes do. What they exchange stays in memory:
through a socket and back takes gloo twenty times as long, and is for tests of gloo.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vlmserve.devices.ranks import join
from vlmserve.engine.rank import follow
from vlmserve.frames import Frames
from vlmserve.layers.parallel import Ranks
from vlmserve.settings.config import EngineConfig


class Meeting:
    """Where threads exchange tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.tensors: list[Tensor | None] = [None] * size


@dataclass(frozen=True)
class ThreadRanks:
    """A `Ranks` of threads."""

    meeting: Meeting
    rank: int

    @property
    def size(self) -> int:
        return len(self.meeting.tensors)

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(torch.stack(self.gather(tensor)).sum(0))

    def largest(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(torch.stack(self.gather(tensor)).amax(0))

    def gather(self, tensor: Tensor) -> list[Tensor]:
        self.meeting.tensors[self.rank] = tensor.clone()
        self.meeting.barrier.wait(60)
        everyones = [one for one in self.meeting.tensors if one is not None]
        self.meeting.barrier.wait(60)
        assert {(one.shape, one.dtype) for one in everyones} == {(tensor.shape, tensor.dtype)}
        return everyones


class RankThreads:
    """In the place of `RankProcesses`. gloo: exchange by it."""

    gloo = False

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        size = config.tensor_parallel_size
        self._meeting = Meeting(size)
        self._store = dist.HashStore() if self.gloo else None  # type: ignore[attr-defined]
        self._queues: list[queue.SimpleQueue[Frames]] = [queue.SimpleQueue() for _ in range(1, size)]
        self._errors: list[Exception] = []
        # No thread refers to this object: the engine is garbage when a test drops it, and its ranks end.
        for rank, steps in enumerate(self._queues, 1):
            meet = (self._store, self._meeting, rank)
            arguments = (config, folder, meet, steps, self._errors)
            threading.Thread(target=_run, args=arguments, daemon=True).start()
        self.ranks = _meet(self._store, self._meeting, 0)

    def send(self, frames: Frames) -> None:
        """See `Followers.send`."""
        for steps in self._queues:
            steps.put([bytes(frame) for frame in frames])

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """See `Followers.explained`."""
        try:
            yield
        except BaseException:
            self._end()
            for error in self._errors:
                raise error from None
            raise

    @property
    def watched(self) -> Sequence[int]:
        """See `Followers.watched`."""
        return []

    @property
    def silence(self) -> float:
        """See `Followers.silence`."""
        return 0.0

    def check(self) -> None:
        """See `Followers.check`."""

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        self._meeting.barrier.abort()
        self.send([])


class GlooThreads(RankThreads):
    """Threads that exchange by gloo, as processes do."""

    gloo = True


def _meet(store: Any, meeting: Meeting, rank: int) -> Ranks:
    size = len(meeting.tensors)
    return ThreadRanks(meeting, rank) if store is None else join(store, rank, size, torch.device("cpu"))


def _run(
    config: EngineConfig,
    folder: Path,
    meet: tuple[Any, Meeting, int],
    steps: queue.SimpleQueue[Frames],
    errors: list[Exception],
) -> None:
    try:
        follow(config, folder, _meet(*meet), iter(steps.get, []))
    except threading.BrokenBarrierError:
        return  # another rank has ended
    except Exception as error:
        errors.append(error)
        meet[1].barrier.abort()
