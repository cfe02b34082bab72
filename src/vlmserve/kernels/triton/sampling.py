"""Samples tokens with Triton: one upload, one launch, one copy back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vlmserve.kernels.torch_sampling import Changes, Filters
from vlmserve.kernels.triton.host_math import cdiv
from vlmserve.kernels.triton.sampling_kernels import change_logits, draw_rows

BLOCK = 4096
GROUP = 32
"""Adjacent tokens whose maximum top-k and top-p check first."""
WARPS = 8

Upload = Callable[[np.ndarray], Tensor]


class TritonDraw:
    """upload: the device's."""

    def __init__(self, upload: Upload, block: int = BLOCK) -> None:
        self._upload, self._block = upload, block

    def __call__(self, logits: Tensor, filters: Filters, numbers: Sequence[float]) -> list[int]:
        if not len(logits):
            return []
        arrays = self.arrays(filters, numbers, Changes(np.empty((2, 0), np.int64), np.empty((3, 0), np.float32)))
        drawn: list[int] = self._drawn(logits, self._upload(arrays[0])).tolist()
        return drawn

    def arrays(self, filters: Filters, numbers: Sequence[float], changes: Changes) -> list[npt.NDArray[Any]]:
        # logits minus their maximum are at most 0
        floors = [math.log(min(min_p, 1.0)) if min_p > 0 else -math.inf for min_p in filters.min_ps]
        columns = (filters.temperatures, filters.top_ks, filters.top_ps, floors)
        options = np.stack(columns, 1).astype(np.float32)
        staged = np.concatenate((np.asarray(numbers, np.float64).view(np.uint8), options.ravel().view(np.uint8)))
        return [staged, *changes] if changes.entries.size else [staged]

    def launch(self, logits: Tensor, uploaded: Sequence[Tensor]) -> Tensor:
        options, *changes = uploaded
        if changes:
            change(logits, *changes)
        return self._drawn(logits, options)

    def _drawn(self, logits: Tensor, on_device: Tensor) -> Tensor:
        """Return int32 ``[rows]``. on_device: random numbers, then options."""
        rows, vocabulary = logits.shape
        tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
        if not rows:
            return tokens
        groups = cdiv(vocabulary, GROUP)
        draw_rows[(rows,)](
            logits,
            on_device[8 * rows :].view(torch.float32),
            on_device[: 8 * rows].view(torch.float64),
            tokens,
            torch.empty((rows, self._block), dtype=torch.float32, device=logits.device),
            torch.empty((rows, groups), dtype=torch.float32, device=logits.device),
            torch.empty((rows, groups), dtype=torch.int32, device=logits.device),
            vocabulary,
            logits.stride(0),
            BLOCK=self._block,
            GROUP=GROUP,
            num_warps=WARPS,
        )
        return tokens


def change(logits: Tensor, entries: Tensor, amounts: Tensor) -> None:
    count = entries.shape[1]
    if count:
        change_logits[(cdiv(count, 256),)](logits, entries, amounts, count, logits.stride(0), BLOCK=256, num_warps=4)
