"""Published formats of quantized weights, written out slowly: packing, and what packed weights stand for in float64.

Sources: AWQ's GEMM order, https://github.com/casper-hansen/AutoAWQ (``WQLinear_GEMM``: eight outputs of a word in the
order 0, 2, 4, 6, 1, 3, 5, 7); GPTQ, https://github.com/ModelCloud/GPTQModel (inputs of a column in words from the
lowest bits on, zero points less one in format "gptq" and as they are in "gptq_v2", ``g_idx`` for the group of each
input); blocks of float8, https://github.com/deepseek-ai/DeepSeek-V3 (``weight_dequant``); bitsandbytes, the tables of
https://github.com/bitsandbytes-foundation/bitsandbytes (``get_4bit_type``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_FP4 = (0, 0.0625, 8, 12, 4, 6, 2, 3)
TABLES = {
    "nf4": (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
            -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
            0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    "fp4": tuple(sign * number / 12 for sign in (1, -1) for number in _FP4),
}  # fmt: skip
"""What the 16 values of a weight of 4 bits stand for in a block whose largest number is 1."""


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


def bitsandbytes4(
    weight: Tensor, kind: str, *, block: int = 64, nested: bool = True, storage: torch.dtype = torch.uint8
) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors that a checkpoint of bitsandbytes has of a layer of 4 bits, and the weight that they stand for in
    float64. nested: factors have 8 bits, in blocks of 256."""
    numbers, table = weight.flatten().double().numpy(), np.array(TABLES[kind], np.float32)
    largest = np.array(
        [np.abs(numbers[first : first + block]).max() for first in range(0, len(numbers), block)], np.float32
    )
    state = {"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": list(weight.shape)}
    parts = {"weight.absmax": torch.from_numpy(largest)}
    meant = largest.astype(np.float64)
    if nested:
        # Not even, and no number of it is that of another value.
        fine = np.sign(steps := np.linspace(-1, 1, 256)) * steps**2
        offset = float(largest.mean())
        starts = range(0, len(largest), 256)
        own = np.array([np.abs(largest[first : first + 256] - offset).max() for first in starts], np.float32)
        spread = np.repeat(own.astype(np.float64), 256)[: len(largest)]
        values = np.abs((largest - offset) / spread - fine[:, None]).argmin(0)
        meant = fine.astype(np.float32)[values] * spread + offset
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        parts = {
            "weight.absmax": torch.from_numpy(values.astype(np.uint8)),
            "weight.nested_absmax": torch.from_numpy(own),
            "weight.nested_quant_map": torch.from_numpy(fine.astype(np.float32)),
        }
    factors = np.repeat(meant, block)[: len(numbers)]
    chosen = np.abs(numbers / factors - table.astype(np.float64)[:, None]).argmin(0)
    octets = [16 * high + low for high, low in zip(chosen[::2], [*chosen[1::2], *[0] * (len(chosen) % 2)], strict=True)]
    parts |= {
        "weight": torch.tensor(octets, dtype=torch.uint8).view(storage)[:, None],
        "weight.quant_map": torch.from_numpy(table),
        f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return parts, torch.from_numpy(table[chosen] * factors).view(weight.shape)


def bitsandbytes8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """As `bitsandbytes4`, of a layer of 8 bits."""
    largest = weight.abs().amax(1)
    values = (weight * (127 / largest[:, None])).round().to(torch.int8)
    parts = {"weight": values, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, values.double() * largest[:, None].double() / 127
