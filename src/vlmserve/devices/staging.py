"""Uploads arrays in one transfer, always through the same memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes per vector load of the kernels."""
FIRST_BYTES = 2**16


class Staging:
    """Two alternating host buffers and one device buffer.

    Addresses stay the same until larger arrays come, for captured steps. An upload is valid until the next one, in
    stream order.
    """

    def __init__(self, device: torch.device, *, reserve: int = FIRST_BYTES) -> None:
        """reserve: initial bytes."""
        self._device = device
        self._reserve(reserve)

    def upload(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """Arrays may change as soon as this returns."""
        ends = list(itertools.accumulate(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays))
        total = ends[-1] if ends else 0
        if total > len(self._on_device):
            self._reserve(max(total, 2 * len(self._on_device)))
        host, copied = self._hosts[0]
        self._hosts.reverse()
        if copied is not None:
            copied.synchronize()  # it has long arrived
        tensors = []
        bytes_of_host = host.numpy()
        for start, array in zip([0, *ends], arrays, strict=False):
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            bytes_of_host[start : start + len(flat)] = flat
            part = self._on_device[start : start + len(flat)]
            tensors.append(part.view(torch.from_numpy(array[:0].copy()).dtype).view(array.shape))
        self._on_device[:total].copy_(host[:total], non_blocking=True)
        if copied is not None:
            copied.record(torch.cuda.current_stream(self._device))
        return tensors

    def _reserve(self, size: int) -> None:
        on_gpu = self._device.type == "cuda"
        # nothing changes if memory runs out here
        on_device = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._hosts: list[tuple[Tensor, torch.cuda.Event | None]] = [
            (torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu), torch.cuda.Event() if on_gpu else None)  # type: ignore[no-untyped-call]
            for _ in range(2)
        ]
        self._on_device = on_device
