"""Weights in the layout of the matmul kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.kernels.triton.activations import ACTIVATIONS
from vlmserve.kernels.triton.expanding import expanded_groups, expanded_rows
from vlmserve.kernels.triton.tuned import LARGE_BLOCK


def block_of(group: int, in_features: int) -> int:
    """Return the inputs of a 4-bit block: two small groups, if possible.

    Byte i has input i of both groups, so that tensor cores multiply twice as many inputs of each at a time.
    """
    return 2 * group if group < LARGE_BLOCK and in_features % (2 * group) == 0 else group


@dataclass(frozen=True, slots=True)
class Stored:
    bits: int
    """4, 8, or the bits of plain numbers."""
    group: int
    """Inputs that share a scale (4-bit)."""
    values: Tensor
    """``[out_features, in_features]``. 4-bit: uint8 ``[out_features, in_features / 2]``; byte i of a block has
    inputs i and i + block / 2, see `block_of`."""
    scales: Tensor | None = None
    """4-bit: float16 ``[groups, out_features]``. 8-bit, with 128 as zero: float32 ``[out_features]``."""
    minimums: Tensor | None = None

    @property
    def block(self) -> int:
        return block_of(self.group, 2 * self.values.shape[1]) if self.bits == 4 else 0

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.values, self.scales, self.minimums) if tensor is not None)

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        assert self.scales is not None
        values = self.values[indices]
        if self.bits == 8:
            return ((values.float() - 128) * self.scales[indices, None]).to(dtype)
        assert self.minimums is not None
        halves = values.view(len(values), -1, self.block // 2)
        integers = torch.cat((halves & 15, halves >> 4), -1).view(len(values), -1, self.group).float()
        scales, minimums = self.scales[:, indices].T.float(), self.minimums[:, indices].T.float()
        return torch.addcmul(minimums[..., None], scales[..., None], integers).to(dtype).reshape(len(values), -1)

    def expanded(self, outputs: slice, dtype: torch.dtype, *, assembly: bool) -> Tensor:
        """Dequantize adjacent outputs in one launch. assembly: see `unpacking`."""
        assert self.scales is not None
        if self.bits == 8:
            return expanded_rows(self.values[outputs], self.scales[outputs], dtype, assembly)
        assert self.minimums is not None
        scales, minimums = self.scales[:, outputs], self.minimums[:, outputs]
        return expanded_groups(self.values[outputs], scales, minimums, self.block, dtype, assembly)


def store(weight: Tensor | QuantizedWeight) -> Stored:
    if isinstance(weight, Tensor):
        return Stored(8 * weight.dtype.itemsize, 0, weight.contiguous())
    if (reason := unsupported_reason(weight, None)) is not None:
        raise ValueError(reason)
    if weight.bits == 8:
        return Stored(8, 0, weight.values.contiguous(), weight.scales[:, 0].float().contiguous())
    halves = weight.values.reshape(weight.shape[0], -1, 2, block_of(weight.group_size, weight.shape[1]) // 2)
    packed = halves[:, :, 0] | halves[:, :, 1] << 4
    scales, minimums = (part.T.to(torch.float16).contiguous() for part in (weight.scales, weight.minimums))
    return Stored(4, weight.group_size, packed.view(weight.shape[0], -1), scales, minimums)


def unsupported_reason(weight: Tensor | QuantizedWeight, activation: str | None) -> str | None:
    if activation is not None and activation not in ACTIVATIONS:
        return f"they do not support the activation {activation}"
    if isinstance(weight, Tensor):
        known = (torch.bfloat16, torch.float16, torch.float32)
        return None if weight.dtype in known else f"they do not support {weight.dtype}"
    if weight.is_float8:
        return "they do not support float8"
    if not weight.is_supported:
        return f"they do not support {weight.bits}-bit groups of {weight.group_size} with these scales"
    if weight.bits == 4 and weight.shape[1] % weight.group_size:
        return f"{weight.shape[1]} inputs are not whole groups of {weight.group_size}"
    return None
