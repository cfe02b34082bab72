"""Matrix products with weights. No autograd: parameters are allocated empty and filled by the weight loader."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Memory for a weight, its pages untouched until the loader writes them."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


# Any number of rows from here on gives the arrangement that is fastest for few and for many rows.
PACKING_ROWS = 64


class Linear(nn.Module):
    """``[..., in_features]`` to ``[..., out_features]``; `weight` is ``[out_features, in_features]`` until packed."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    packed: Tensor | None

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features, dtype=dtype, device=device)
        self.bias = empty_parameter(out_features, dtype=dtype, device=device) if bias else None
        self.packed = None

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            output: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
            return output
        return F.linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """Put the weight into the order in which oneDNN multiplies, and drop the plain one.

        Otherwise each product rearranges it anew, which is half of the time of products with few rows.
        """
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data, PACKING_ROWS)
        del self.weight


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `Linear.pack` works here: on a CPU, in a torch with oneDNN, in a type that it computes."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


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
            yield f"{name}.weight", self.weight[start : start + size]
            if self.bias is not None:
                yield f"{name}.bias", self.bias[start : start + size]
            start += size


class Embedding(nn.Module):
    """A table of vectors; ``[tokens]`` int64 to ``[tokens, size]``."""

    def __init__(self, count: int, size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = empty_parameter(count, size, dtype=dtype, device=device)

    def forward(self, indices: Tensor) -> Tensor:
        return F.embedding(indices, self.weight)
