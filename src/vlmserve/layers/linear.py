"""Matrix products with weights. No autograd: parameters are allocated empty and filled by the weight loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlmserve.kernels import cpu_native
from vlmserve.kernels.choice import multiplies_bfloat16
from vlmserve.kernels.cpu_native import PackedLinear
from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.layers.activation import activation


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Memory for a weight, its pages untouched until the loader writes them."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


# Any number of rows from here on gives the arrangement that is fastest for few and for many rows.
PACKING_ROWS = 64

FEW_ROWS = 8
"""Up to so many rows, a product of bfloat16 takes no longer than reading its weight, whatever computes it."""


class Weight(nn.Module):
    """A matrix that inputs are multiplied with: plain, quantized, or packed for a kernel.

    `weight`, ``[out_features, in_features]``, is there until it is quantized or packed.
    """

    weight: nn.Parameter

    def __init__(self, in_features: int, out_features: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features, dtype=dtype, device=device)
        self.in_features, self.out_features = in_features, out_features
        self.dtype = dtype
        self._quantized: QuantizedWeight | None = None
        self._native: PackedLinear | None = None

    def quantize(self, weight: QuantizedWeight) -> None:
        """Take a quantized weight instead of the plain one."""
        self._quantized = weight
        del self.weight

    @property
    def num_bytes(self) -> int:
        """Memory that the weight takes, in whatever form it is."""
        if self._native is not None:
            return self._native.num_bytes
        if self._quantized is not None:
            return self._quantized.num_bytes
        return self.in_features * self.out_features * self.dtype.itemsize

    @property
    def _matrix(self) -> Tensor:
        return self.weight if self._quantized is None else self._quantized.dequantize().to(self.dtype)

    def _pack(self, bias: Tensor | None = None, **options: Any) -> None:
        """Arrange the weight for the native kernel and drop what it was before."""
        weight = self.weight.data if self._quantized is None else self._quantized
        self._native = PackedLinear(weight, bias, dtype=self.dtype, **options)
        if self._quantized is None:
            del self.weight
        self._quantized = None


class Linear(Weight):
    """``act([..., in_features])`` to ``[..., out_features]``.

    act: an activation's Hugging Face name, applied to the output; None: none.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        act: str | None = None,
    ) -> None:
        super().__init__(in_features, out_features, dtype=dtype, device=device)
        self.bias = empty_parameter(out_features, dtype=dtype, device=device) if bias else None
        self.act = act
        self._activation = None if act is None else activation(act)
        self._reordered: Tensor | None = None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """residual: shaped like the output, added to it."""
        if self._native is not None:
            return self._native(x, residual)
        output = self._activated(self._product(x))
        return output if residual is None else output + residual

    def _product(self, x: Tensor) -> Tensor:
        if self._reordered is not None:
            output: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._reordered, self.bias, "none", [], "")
            return output
        return product(x, self._matrix, self.bias)

    def _activated(self, x: Tensor) -> Tensor:
        return x if self._activation is None else self._activation(x)

    def reorder(self, rows: Tensor) -> None:
        """Before the weight is packed: put outputs into another order; rows: which old one is each new one."""
        if self._quantized is None:
            self.weight.data = self.weight.data[rows]
        else:
            self._quantized = self._quantized[rows]
        if self.bias is not None:
            self.bias.data = self.bias.data[rows]

    def pack(self, *, native: bool) -> None:
        """Put the weight into the order in which it is multiplied, and drop the plain one, where that is possible.

        native: for the native kernel. Otherwise for oneDNN, which without would rearrange it anew for each product:
        that is half of the time of products with few rows.
        """
        if self._native is not None:
            return
        if native and cpu_native.can_pack(self.in_features, self.dtype):
            self._pack_native()
        elif self._quantized is None and can_reorder(self.weight.dtype, self.weight.device):
            self._reordered = torch.ops.mkldnn._reorder_linear_weight(self.weight.data, PACKING_ROWS)
            del self.weight

    def _pack_native(self) -> None:
        self._pack(None if self.bias is None else self.bias.data, activation=self.act)


def can_reorder(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN takes rearranged weights here: on a CPU, in a torch that has it, in a type that it computes."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and multiplies_bfloat16())


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``[..., in_features]`` times the transpose of ``[out_features, in_features]``, plus ``[out_features]``.

    Many rows of bfloat16 on a CPU without instructions for it are multiplied in float32: torch would take several times
    as long. Few rows are not, because they cost no more than reading the weight does.
    """
    rows = x.numel() // x.shape[-1]
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or rows <= FEW_ROWS or multiplies_bfloat16():
        return F.linear(x, weight, bias)
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).bfloat16()


class MergedLinear(Linear):
    """Several projections of the same input as one product, their outputs side by side.

    parts: the name that each has in a checkpoint, with its number of output features.
    """

    def __init__(
        self, in_features: int, parts: dict[str, int], *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias, dtype=dtype, device=device)
        self.parts = parts

    def slots(self) -> Iterator[tuple[str, Tensor]]:
        """Where each part's tensors go: ``("q_proj.weight", rows of the merged weight)``…"""
        start = 0
        for name, size in self.parts.items():
            if "weight" in self._parameters:
                yield f"{name}.weight", self.weight[start : start + size]
            if self.bias is not None:
                yield f"{name}.bias", self.bias[start : start + size]
            start += size


class GatedLinear(MergedLinear):
    """``act(gate(x)) * up(x)``; parts: those two in this order, equally wide."""

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        act: str,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(in_features, parts, bias=bias, dtype=dtype, device=device)
        self.act = act
        self._activation = activation(act)

    def _activated(self, x: Tensor) -> Tensor:
        assert self._activation is not None
        gate, up = x.chunk(2, -1)
        return self._activation(gate) * up

    def pack(self, *, native: bool) -> None:
        """As `Linear.pack`; the native kernel knows no biases of gates."""
        super().pack(native=native and self.bias is None)

    def _pack_native(self) -> None:
        self._pack(activation=self.act, gated=True)


class OutputLinear(Linear):
    """The output head: ``[rows, in_features]`` to float32 ``[rows, out_features]``."""

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """As `forward`; out: contiguous memory that the result may take."""
        return self(hidden) if self._native is None else self._native(hidden, out=out)

    def _activated(self, x: Tensor) -> Tensor:
        return x.float()

    def _pack_native(self) -> None:
        self._pack(None if self.bias is None else self.bias.data, float_output=True)


class Bias(nn.Module):
    """A vector that is added to rows, in place."""

    def __init__(self, size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.bias = empty_parameter(size, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.bias)


class Embedding(nn.Module):
    """A table of vectors; ``[tokens]`` int64 to ``[tokens, size]``."""

    def __init__(self, count: int, size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = empty_parameter(count, size, dtype=dtype, device=device)

    def forward(self, indices: Tensor) -> Tensor:
        return F.embedding(indices, self.weight)


class TiedEmbedding(Weight):
    """A table of vectors that is the output head as well; ``[tokens]`` int64 to ``[tokens, size]``."""

    def __init__(self, count: int, size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(size, count, dtype=dtype, device=device)

    def forward(self, indices: Tensor) -> Tensor:
        if self._native is not None:
            return self._native.rows(indices)
        if self._quantized is not None:
            return self._quantized[indices].dequantize().to(self.dtype)
        return F.embedding(indices, self.weight)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """``[rows, size]`` to float32 ``[rows, count]``; out: contiguous memory that the result may take."""
        return product(hidden, self._matrix).float() if self._native is None else self._native(hidden, out=out)

    def pack(self, *, native: bool) -> None:
        """As `Linear.pack`. oneDNN cannot give back single rows, so that for it the table stays as it is."""
        if native and cpu_native.can_pack(self.in_features, self.dtype):
            self._pack(float_output=True)
