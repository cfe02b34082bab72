"""Samples tokens with the native CPU kernel, without sorting logits (csrc/sampling.h)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from vlmserve.kernels.extension import extension
from vlmserve.kernels.torch_sampling import Filters


def draw(logits: Tensor, filters: Filters, numbers: Sequence[float]) -> list[int]:
    rows, vocabulary = logits.shape
    logits = logits.contiguous()
    tokens = array("q", bytes(8 * rows))
    arrays = (
        array("f", filters.temperatures),
        array("f", filters.top_ps),
        array("f", filters.min_ps),
        array("q", filters.top_ks),
        array("d", numbers),
        tokens,
    )
    if any(len(values) != rows for values in arrays) or logits.dtype != torch.float32:
        raise ValueError(f"{rows} rows of {logits.dtype} logits need as many parameters, and float32")
    if rows:
        addresses = [values.buffer_info()[0] for values in arrays]
        extension().sampling(logits.data_ptr(), *addresses, rows, vocabulary, torch.get_num_threads())
    return tokens.tolist()
