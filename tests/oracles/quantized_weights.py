"""Published formats of quantized weights, written out slowly: packing, and what packed weights stand for in float64.

Sources: AWQ's GEMM order, https://github.com/casper-hansen/AutoAWQ (``WQLinear_GEMM``: eight outputs of a word in the
order 0, 2, 4, 6, 1, 3, 5, 7); GPTQ, https://github.com/ModelCloud/GPTQModel (inputs of a column in words from the
lowest bits on, zero points less one in format "gptq" and as they are in "gptq_v2", ``g_idx`` for the group of each
input); blocks of float8, https://github.com/deepseek-ai/DeepSeek-V3 (``weight_dequant``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Rounded:
    """A weight ``[out_features, in_features]`` as ``scale * (value - zero)`` of whole numbers.

    scales, zeros: ``[out_features, groups]``. group_of: ``[in_features]``.
    """

    values: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    group_of: np.ndarray

    def dequantized(self) -> Tensor:
        """float64, one weight after the other."""
        result = np.empty(self.values.shape)
        for column, group in enumerate(self.group_of):
            result[:, column] = self.scales[:, group].astype(np.float64) * (
                self.values[:, column].astype(np.float64) - self.zeros[:, group]
            )
        return torch.from_numpy(result)


def rounded(
    weight: Tensor, *, bits: int, group_size: int, symmetric: bool, group_of: np.ndarray | None = None
) -> Rounded:
    """To the nearest value of its group, with float16 scales; group_of: where inputs of a group do not lie together."""
    matrix = weight.double().numpy()
    if group_of is None:
        group_of = np.arange(matrix.shape[1]) // group_size
    groups = group_of.max() + 1
    most = 2**bits - 1
    scales = np.empty((len(matrix), groups), np.float16)
    zeros = np.empty((len(matrix), groups), np.int64)
    values = np.empty(matrix.shape, np.int64)
    for group in range(groups):
        columns = np.flatnonzero(group_of == group)
        part = matrix[:, columns]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if symmetric:
            high = np.maximum(-low, high)
            low = -high
        scales[:, group] = np.maximum((high - low) / most, 1e-4)
        step = scales[:, group].astype(np.float64)
        zeros[:, group] = (most + 1) // 2 if symmetric else np.clip(np.round(-low / step), 0, most)
        values[:, columns] = np.clip(np.round(part / step[:, None]) + zeros[:, group, None], 0, most)
    return Rounded(values, scales, zeros, group_of)


def _words(rows: np.ndarray, bits: int, order: tuple[int, ...]) -> Tensor:
    """``[rows, values]`` to int32 words: the value ``order[i]`` of a word takes its i-th lowest bits."""
    count = 32 // bits
    words = np.zeros((rows.shape[0], rows.shape[1] // count), np.uint64)
    for word in range(words.shape[1]):
        for place, index in enumerate(order):
            words[:, word] |= rows[:, word * count + index].astype(np.uint64) << np.uint64(bits * place)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def awq(weight: Rounded) -> dict[str, Tensor]:
    """The tensors that an AWQ checkpoint of version GEMM has of a layer, by the ends of their names."""
    return {
        "qweight": _words(weight.values.T, 4, AWQ_ORDER),
        "qzeros": _words(weight.zeros.T, 4, AWQ_ORDER),
        "scales": torch.from_numpy(weight.scales.T.copy()),
    }


def gptq(weight: Rounded, bits: int, checkpoint_format: str) -> dict[str, Tensor]:
    """The tensors that a GPTQ checkpoint has of a layer, by the ends of their names."""
    order = tuple(range(32 // bits))
    zeros = _words(weight.zeros.T, bits, order)
    if checkpoint_format == "gptq":
        zeros = zeros - {4: 0x11111111, 8: 0x01010101}[bits]
    return {
        "qweight": _words(weight.values.T.reshape(-1, 32 // bits, len(weight.values)).transpose(0, 2, 1).reshape(
            -1, 32 // bits), bits, order).view(-1, len(weight.values)),
        "qzeros": zeros,
        "scales": torch.from_numpy(weight.scales.T.copy()),
        "g_idx": torch.from_numpy(weight.group_of.astype(np.int32)),
    }  # fmt: skip


def float8_blocks(weight: Tensor, size: int) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors that a checkpoint of method "fp8" has of a layer, and the weight that they stand for in float64."""
    out_features, in_features = weight.shape
    scales = torch.empty(-(-out_features // size), -(-in_features // size))
    packed = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    expected = torch.empty(weight.shape, dtype=torch.float64)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block = slice(row * size, (row + 1) * size), slice(column * size, (column + 1) * size)
            scales[row, column] = weight[block].abs().max() / 448
            packed[block] = (weight[block] / scales[row, column]).to(torch.float8_e4m3fn)
            expected[block] = packed[block].double() * scales[row, column].double()
    return {"weight": packed, "weight_scale_inv": scales}, expected
