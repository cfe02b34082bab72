"""Weights of few bits, as data: what kernels multiply with and quantization methods make."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP_SIZES = (32, 64, 128)
"""Inputs of 4 bits that kernels take together."""
BYTE_GROUP_SIZES = (16, *GROUP_SIZES)
"""Inputs of 8 bits that the native kernels take together, if not all that an output has."""
FLOAT8 = torch.float8_e4m3fn
CODES = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int16)
"""Values of the 4-bit codes of GGUF's IQ4_NL."""
_F16_ERROR = 2.0**-10
"""What becoming float16 may change in scales, beside the largest one of the same output."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight ``[out_features, in_features]`` as ``scale * u + minimum`` of unsigned integers u.

    bits: 8 or 4. group_size: how many inputs of an output share a scale and a minimum.
    values: uint8 ``[out_features, in_features]``, one a byte whatever `bits` says. scales, minimums: float32
    ``[out_features, groups]``.
    input_bits: what kernels that round inputs keep of them: 16, which is more than bfloat16 has, or 8, with which many
    rows take less time; beside 4 bits each group then has a scale of its own. 0: 16 beside 8 bits, 8 beside 4.
    is_float8: the values are the bits of float8 numbers (`FLOAT8`), and minimums are 0.
    is_coded: the values are places in `CODES`, and minimums are 0.
    order: int64 ``[in_features]``, which input of the layer each column of `values` is for; None: they are as the
    layer's. Kernels know no order: who multiplies puts inputs into it.
    """

    bits: int
    group_size: int
    values: Tensor
    scales: Tensor
    minimums: Tensor
    input_bits: int = 0
    order: Tensor | None = None
    is_float8: bool = False
    is_coded: bool = False

    def __post_init__(self) -> None:
        if not self.input_bits:
            object.__setattr__(self, "input_bits", 16 if self.bits == 8 else 8)
        out_features, in_features = self.values.shape
        groups = -(-in_features // self.group_size)
        if self.scales.shape != (out_features, groups) or self.minimums.shape != (out_features, groups):
            raise ValueError(
                f"{tuple(self.values.shape)} weights in groups of {self.group_size} need scales and minimums "
                f"{(out_features, groups)}, not {tuple(self.scales.shape)} and {tuple(self.minimums.shape)}"
            )

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def num_bytes(self) -> int:
        """Memory that it takes packed: its bits, and two bytes for each scale and minimum of a group, four for a scale
        of an output."""
        each = 4 if self.has_scales_of_outputs or self.has_minimums else 2
        return self.values.numel() * self.bits // 8 + self.scales.numel() * each

    @property
    def is_symmetric(self) -> bool:
        """Whether the value in the middle stands for zero."""
        return torch.equal(self.minimums, -(2 ** (self.bits - 1)) * self.scales)

    @property
    def has_minimums(self) -> bool:
        """True if groups need minimums besides their scales."""
        return not self.is_coded and not self.is_symmetric

    @property
    def has_scales_of_outputs(self) -> bool:
        """Whether it is 8 bits with one scale for each output and 128 for zero."""
        return self.bits == 8 and not self.is_float8 and self.scales.shape[1] == 1 and self.is_symmetric

    @property
    def is_supported(self) -> bool:
        """Whether the kernels of all devices multiply with it as it is.

        That is 4 bits in groups of `GROUP_SIZES`, with scales and minimums that float16 has, or
        `has_scales_of_outputs`."""
        if self.is_coded:
            return False
        if self.bits == 4:
            largest = max(float(tensor.abs().max()) for tensor in (self.scales, self.minimums))
            return self.group_size in GROUP_SIZES and largest <= torch.finfo(torch.float16).max
        return self.has_scales_of_outputs

    @property
    def is_in_coded_groups(self) -> bool:
        """True for codes in groups that the native kernels take, with scales that float16 has."""
        fits = float(self.scales.abs().max()) <= torch.finfo(torch.float16).max
        return self.is_coded and self.group_size in GROUP_SIZES and fits

    @property
    def is_in_byte_groups(self) -> bool:
        """Whether it is 8 bits in groups of `BYTE_GROUP_SIZES`, as the native kernels for a CPU take them: with scales
        that are nearly the same in float16."""
        if self.bits != 8 or self.is_float8:
            return False
        if self.group_size not in BYTE_GROUP_SIZES or self.has_scales_of_outputs:
            return False
        rounded = self.scales.half().float()
        errors, largest = (rounded - self.scales).abs().amax(1), self.scales.abs().amax(1)
        middles = self.minimums + 128 * self.scales
        fit = float(middles.abs().max()) <= torch.finfo(torch.float16).max
        return fit and bool((errors <= _F16_ERROR * largest).all())

    def in_smaller_groups(self, sizes: Sequence[int] | None = None) -> QuantizedWeight:
        """The same weight in groups of the largest of some sizes that divides its own; itself if none does. sizes:
        default: those that kernels take, where its own is none of them."""
        if self.is_float8:
            return self
        if sizes is None:
            sizes = GROUP_SIZES if self.bits == 4 else BYTE_GROUP_SIZES
            if self.group_size in sizes or self.has_scales_of_outputs:
                return self
        own = min(self.group_size, self.shape[1]) if self.scales.shape[1] == 1 else self.group_size
        size = next((size for size in sorted(sizes, reverse=True) if own % size == 0), None)
        if size is None:
            return self
        groups = -(-self.shape[1] // size)
        scales, minimums = (
            tensor.repeat_interleave(own // size, 1)[:, :groups] for tensor in (self.scales, self.minimums)
        )
        return dataclasses.replace(self, group_size=size, scales=scales, minimums=minimums)

    def in_bytes(self) -> QuantizedWeight:
        """The same weight in 8 bits."""
        if self.bits == 8:
            return self
        if self.is_coded:
            values = (CODES + 128).to(torch.uint8)[self.values.int()]
            return dataclasses.replace(self, bits=8, values=values, minimums=-128 * self.scales, is_coded=False)
        minimums = self.minimums - 128 * self.scales
        return dataclasses.replace(self, bits=8, values=self.values + 128, minimums=minimums, input_bits=16)

    def dequantize(self) -> Tensor:
        """The weight that this stands for, float32 ``[out_features, in_features]``, in the order of the layer's
        inputs."""
        columns = self._dequantized_columns()
        return columns if self.order is None else columns[:, self.order.argsort()]

    def _dequantized_columns(self) -> Tensor:
        rows, width = self.shape
        if self.is_coded:
            return self.in_bytes()._dequantized_columns()
        if self.is_float8:
            return self.values.view(FLOAT8).float() * self.scales.repeat_interleave(self.group_size, 1)[:, :width]
        if self.scales.shape[1] * self.group_size == width:
            grouped = self.values.reshape(rows, -1, self.group_size).float()
            return torch.addcmul(self.minimums[..., None], self.scales[..., None], grouped).reshape(rows, width)
        scales, minimums = (
            tensor.repeat_interleave(self.group_size, 1)[:, :width] for tensor in (self.scales, self.minimums)
        )
        return torch.addcmul(minimums, scales, self.values.float())

    def is_like(self, other: QuantizedWeight) -> bool:
        """Whether both take the same inputs in the same form, so that they can be one."""
        if (self.is_float8, self.is_coded) != (other.is_float8, other.is_coded):
            return False
        if (self.bits, self.group_size, self.input_bits) != (other.bits, other.group_size, other.input_bits):
            return False
        if self.order is None or other.order is None:
            return self.order is other.order
        return torch.equal(self.order, other.order)

    @classmethod
    def join(cls, weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Weights for the same inputs as one, their outputs side by side. Several kinds become 8 bits in the largest
        groups that all theirs consist of. Raises ValueError if there are none."""
        first = weights[0]
        if len(weights) == 1:
            return first
        if any(weight.is_float8 != first.is_float8 for weight in weights):
            raise ValueError("float8 numbers and integers cannot be one weight")
        if not all(map(first.is_like, weights)):
            sizes = [weight.shape[1] if weight.scales.shape[1] == 1 else weight.group_size for weight in weights]
            common = [math.gcd(*sizes)]
            weights = [weight.in_bytes().in_smaller_groups(common) for weight in weights]
            first = weights[0]
        if not all(map(first.is_like, weights)):
            raise ValueError("weights of several kinds cannot be one")
        values, scales, minimums = (
            torch.cat([getattr(weight, name) for weight in weights]) for name in ("values", "scales", "minimums")
        )
        return dataclasses.replace(first, values=values, scales=scales, minimums=minimums)

    def inputs(self, first: int, last: int) -> QuantizedWeight | None:
        """The weight of inputs ``first <= i < last``; None if that divides a group, as it does where these
        do not lie side by side."""
        if self.order is not None:
            return None
        if self.scales.shape[1] == 1:
            return dataclasses.replace(self, group_size=last - first, values=self.values[:, first:last])
        size = self.group_size
        if first % size or (last % size and last != self.shape[1]):
            return None
        groups = slice(first // size, -(-last // size))
        return dataclasses.replace(
            self, values=self.values[:, first:last], scales=self.scales[:, groups], minimums=self.minimums[:, groups]
        )

    def __getitem__(self, rows: Tensor | slice) -> QuantizedWeight:
        """The weight of some outputs."""
        values, scales, minimums = self.values[rows], self.scales[rows], self.minimums[rows]
        return dataclasses.replace(self, values=values, scales=scales, minimums=minimums)
