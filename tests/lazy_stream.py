"""A stream of copies that makes each as late as somebody waits for it, or at once: whatever is read or overwritten too
early shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmserve.devices.streams import CopyEvent


@dataclass
class LazyEvent:
    """What a wait for it does."""

    synchronize: Callable[[], None]


class LazyStream:
    """A `CopyStream` on a CPU. lazy: copies are made when something waits for them, and then those before as well."""

    def __init__(self, *, lazy: bool) -> None:
        self._lazy = lazy
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._done = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See `CopyStream.empty`."""
        return torch.empty(shape, dtype=dtype)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See `CopyStream.copy`."""
        self._waiting.append((target, source))
        if not self._lazy:
            self._run(self._done + 1)

    def record(self) -> CopyEvent:
        """See `CopyStream.record`."""
        until = self._done + len(self._waiting)
        return LazyEvent(lambda: self._run(until))

    def record_computed(self) -> CopyEvent:
        """See `CopyStream.record_computed`. A CPU computes at once."""
        return LazyEvent(lambda: None)

    def wait(self, computed: CopyEvent) -> None:
        """See `CopyStream.wait`."""

    def let_compute_wait(self, copied: CopyEvent) -> None:
        """See `CopyStream.let_compute_wait`."""
        copied.synchronize()

    def _run(self, until: int) -> None:
        while self._done < until:
            target, source = self._waiting.pop(0)
            target.copy_(source)
            self._done += 1
