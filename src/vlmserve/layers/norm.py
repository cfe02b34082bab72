"""Normalizations over the last axis."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlmserve.kernels.cpu_native import NativeNorm
from vlmserve.layers.linear import empty_parameter


class RMSNorm(nn.Module):
    """Root mean square normalization, computed in float32 (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype, device=device)
        self.eps = eps
        self._native: NativeNorm | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self._native is not None:
            return self._native(x)
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)

    def use_native(self) -> None:
        """Compute with the native kernel from now on."""
        self._native = NativeNorm(self.weight.data, None, self.eps)


class LayerNorm(nn.Module):
    """Layer normalization with scale and shift (https://arxiv.org/abs/1607.06450)."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype, device=device)
        self.bias = empty_parameter(size, dtype=dtype, device=device)
        self.eps = eps
        self._native: NativeNorm | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self._native is not None:
            return self._native(x)
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)

    def use_native(self) -> None:
        """Compute with the native kernel from now on."""
        self._native = NativeNorm(self.weight.data, self.bias.data, self.eps)
