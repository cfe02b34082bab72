"""Quantized weights, as kernels read them and quantization methods make them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP_SIZES = (32, 64, 128)
"""Group sizes of 4-bit weights that kernels support."""
BYTE_GROUP_SIZES = (16, *GROUP_SIZES)
"""Group sizes of 8-bit weights that native kernels support, besides one group per output."""
FLOAT8 = torch.float8_e4m3fn
CODES = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int16)
"""Values of the 4-bit codes of GGUF's IQ4_NL."""
_F16_ERROR = 2.0**-10
"""Allowed rounding error of float16 scales, relative to the output's largest scale."""


def usual_input_bits(bits: int, *, is_coded: bool) -> int:
    """Return 8 for 4-bit weights, as in llama.cpp, because bytes multiply faster. Other weights keep 16.

    is_coded: weights are places in `CODES`.
    """
    return 8 if bits == 4 and not is_coded else 16


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight ``[out_features, in_features]``: ``scale * u + minimum`` with unsigned integers u."""

    bits: int
    group_size: int
    """Inputs that share a scale and a minimum."""
    values: Tensor
    """uint8 ``[out_features, in_features]``, one value per byte for any `bits`."""
    scales: Tensor
    """float32 ``[out_features, groups]``."""
    minimums: Tensor
    input_bits: int = 0
    """Precision of rounded inputs: 16 (more than bfloat16 has), or 8 (faster for many rows; with 4-bit weights, each
    group of inputs has a scale). 0: see `usual_input_bits`."""
    order: Tensor | None = None
    is_float8: bool = False
    is_coded: bool = False

    def __post_init__(self) -> None:
        if not self.input_bits:
            object.__setattr__(self, "input_bits", usual_input_bits(self.bits, is_coded=self.is_coded))
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
        """Values, and 2 bytes for each scale and minimum of a group, 4 for an output's scale."""
        each = 4 if self.has_scales_of_outputs or self.has_minimums else 2
        return self.values.numel() * self.bits // 8 + self.scales.numel() * each

    @property
    def is_symmetric(self) -> bool:
        return torch.equal(self.minimums, -(2 ** (self.bits - 1)) * self.scales)

    @property
    def has_minimums(self) -> bool:
        return not self.is_coded and not self.is_symmetric

    @property
    def has_scales_of_outputs(self) -> bool:
        """True for 8-bit weights with one scale per output and 128 as zero."""
        return self.bits == 8 and not self.is_float8 and self.scales.shape[1] == 1 and self.is_symmetric

    @property
    def is_supported(self) -> bool:
        """Return whether kernels of all devices read it directly.

        They support 4-bit weights in groups of `GROUP_SIZES` with float16 scales and minimums, and
        `has_scales_of_outputs`.
        """
        if self.is_coded:
            return False
        if self.bits == 4:
            largest = max(float(tensor.abs().max()) for tensor in (self.scales, self.minimums))
            return self.group_size in GROUP_SIZES and largest <= torch.finfo(torch.float16).max
        return self.has_scales_of_outputs

    @property
    def is_in_coded_groups(self) -> bool:
        """Native kernels need float16 scales."""
        fits = float(self.scales.abs().max()) <= torch.finfo(torch.float16).max
        return self.is_coded and self.group_size in GROUP_SIZES and fits

    @property
    def is_in_byte_groups(self) -> bool:
        """Native kernels need scales that are almost exact in float16."""
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
        """Use the largest of `sizes` that divides the group size, else self.

        sizes: by default the supported sizes, unless its own is supported.
        """
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
        if self.bits == 8:
            return self
        if self.is_coded:
            values = (CODES + 128).to(torch.uint8)[self.values.int()]
            return dataclasses.replace(self, bits=8, values=values, minimums=-128 * self.scales, is_coded=False)
        minimums = self.minimums - 128 * self.scales
        return dataclasses.replace(self, bits=8, values=self.values + 128, minimums=minimums, input_bits=16)

    def dequantize(self) -> Tensor:
        """Return float32 ``[out_features, in_features]`` in the layer's input order."""
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
        if (self.is_float8, self.is_coded) != (other.is_float8, other.is_coded):
            return False
        if (self.bits, self.group_size, self.input_bits) != (other.bits, other.group_size, other.input_bits):
            return False
        if self.order is None or other.order is None:
            return self.order is other.order
        return torch.equal(self.order, other.order)

    @classmethod
    def join(cls, weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Different kinds become 8-bit in the largest common group size. Raises ValueError if there is none."""
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
        """None if ``first <= i < last`` splits a group, or inputs are reordered."""
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
        values, scales, minimums = self.values[rows], self.scales[rows], self.minimums[rows]
        return dataclasses.replace(self, values=values, scales=scales, minimums=minimums)
