"""Copies between host and device on a separate stream."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class CopyEvent(Protocol):
    def synchronize(self) -> None:
        """The host waits until the device has passed this point."""
        ...


class CopyStream(Protocol):
    """Ordered copies, synchronized with the compute stream."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """For copies that the compute stream reads."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Host memory must be pinned, and unchanged until the copy runs."""
        ...

    def record(self) -> CopyEvent: ...

    def record_computed(self) -> CopyEvent: ...

    def wait(self, computed: CopyEvent) -> None:
        """Delay copies until the computation has passed the event."""
        ...

    def let_compute_wait(self, copied: CopyEvent) -> None:
        """Delay computation until the copies have passed the event."""
        ...


class CudaCopyStream:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Not reused before the compute stream has read it."""
        with torch.cuda.stream(self._stream):
            memory = torch.empty(shape, dtype=dtype, device=self._device)
        memory.record_stream(torch.cuda.current_stream(self._device))
        return memory

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def record(self) -> CopyEvent:
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def record_computed(self) -> CopyEvent:
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def wait(self, computed: CopyEvent) -> None:
        assert isinstance(computed, torch.cuda.Event)
        self._stream.wait_event(computed)

    def let_compute_wait(self, copied: CopyEvent) -> None:
        assert isinstance(copied, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(copied)
