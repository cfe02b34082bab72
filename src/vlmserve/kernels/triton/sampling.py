"""Drawing tokens by Triton: one upload of options, one launch, one copy back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from vlmserve.kernels.triton.sampling_kernels import change_logits, draw_rows

BLOCK = 2048

Upload = Callable[[np.ndarray], Tensor]


class TritonDraw:
    """Draws tokens. A `Draw`; upload: the device's."""

    def __init__(self, upload: Upload, block: int = BLOCK) -> None:
        """block: logits that a program looks at at a time."""
        self._upload, self._block = upload, block

    def __call__(
        self,
        logits: Tensor,
        *,
        temperatures: Sequence[float],
        top_ks: Sequence[int],
        top_ps: Sequence[float],
        min_ps: Sequence[float],
        numbers: Sequence[float],
    ) -> list[int]:
        """See `Draw`."""
        rows, vocabulary = logits.shape
        if not rows:
            return []
        # A logit less the largest one is never above 0: no more can be asked for.
        floors = [math.log(min(min_p, 1.0)) if min_p > 0 else -math.inf for min_p in min_ps]
        options = np.stack((temperatures, top_ks, top_ps, floors), 1).astype(np.float32)
        staged = np.concatenate((np.asarray(numbers, np.float64).view(np.uint8), options.ravel().view(np.uint8)))
        on_device = self._upload(staged)
        tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
        draw_rows[(rows,)](
            logits,
            on_device[8 * rows :].view(torch.float32),
            on_device[: 8 * rows].view(torch.float64),
            tokens,
            vocabulary,
            logits.stride(0),
            BLOCK=self._block,
            num_warps=8,
        )
        drawn: list[int] = tokens.tolist()
        return drawn


def change(
    logits: Tensor,
    upload: Upload,
    entries: npt.NDArray[np.int64],
    changes: npt.NDArray[np.float32],
) -> None:
    """Add biases and apply penalties, in place; see `change_logits`."""
    count = entries.shape[1]
    if not count:
        return
    change_logits[(triton.cdiv(count, 256),)](
        logits, upload(entries), upload(changes), count, logits.stride(0), BLOCK=256, num_warps=4
    )
