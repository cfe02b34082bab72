"""Copies between host and device beside what the device computes, on a stream of their own."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class CopyEvent(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Have the host wait until the device has passed it."""
        ...


class CopyStream(Protocol):
    """A stream of copies, which are made in order, and its order beside the stream that computes."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory on the device that copies are made to and the other stream reads."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy, once the stream has come to it. Memory of the host must be pinned, and stay as it is until then."""
        ...

    def record(self) -> CopyEvent:
        """Behind all copies so far."""
        ...

    def record_computed(self) -> CopyEvent:
        """Behind all that was given to the device to compute so far."""
        ...

    def wait(self, computed: CopyEvent) -> None:
        """Make no further copy before what was computed."""
        ...

    def let_compute_wait(self, copied: CopyEvent) -> None:
        """Compute nothing further before what was copied."""
        ...


class CudaCopyStream:
    """A `CopyStream` of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See `CopyStream.empty`. It is not given away again before the computing stream has read it."""
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
