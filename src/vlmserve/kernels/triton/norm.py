"""RMSNorm and LayerNorm, with what is added behind them, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vlmserve.kernels.triton.dependent import wait_for_previous
from vlmserve.kernels.triton.host_math import next_power_of_2
from vlmserve.kernels.triton.launching import Kernel

MAX_SIZE = 16384
"""Elements of a row that one program keeps in registers."""


@Kernel
@triton.jit
def norm_rows(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr, heads, stride_token, stride_head, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """One row of `SIZE` elements a program; it is computed in float32. Rows are ``[tokens, heads]`` of them."""
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    x = tl.load(x_ptr + row // heads * stride_token + row % heads * stride_head + columns, inside, 0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, inside, 0.0).to(tl.float32)
    if HAS_BIAS:
        x = tl.where(inside, x - tl.sum(x, 0) / SIZE, 0.0)
    result = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps) * weight
    if HAS_BIAS:
        result += tl.load(bias_ptr + columns, inside, 0.0).to(tl.float32)
    if HAS_RESIDUAL:
        result += tl.load(residual_ptr + row * SIZE + columns, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + columns, result.to(out_ptr.dtype.element_ty), inside)


class TritonNorm:
    """RMSNorm, or LayerNorm where there is a bias. A `Norm`.

    weight, bias: ``[size]``; float32 weights are not rounded to the type of what is normed. Raises ValueError for rows
    of more than `MAX_SIZE` elements.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        if len(weight) > MAX_SIZE:
            raise ValueError(f"a norm over {len(weight)} elements is larger than {MAX_SIZE}")
        self.weight, self._bias, self.eps = weight.contiguous(), bias, eps
        self._block = next_power_of_2(len(weight))
        self._warps = min(16, max(1, self._block // 512))

    @property
    def only_scales(self) -> bool:
        """Whether it does nothing but scale rows and their elements, as RMSNorm does."""
        return self._bias is None

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """``[..., size]`` to the same, contiguous. residual: shaped like it, is added behind the norm."""
        size = len(self.weight)
        rows = x if x.ndim == 3 else x.reshape(-1, 1, size)
        if rows.stride(2) != 1:
            rows = rows.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        tokens, heads, _ = rows.shape
        if not tokens * heads:
            return out
        norm_rows[(tokens * heads,)](
            rows,
            self.weight,
            self.weight if self._bias is None else self._bias,
            out if residual is None else residual.contiguous(),
            out,
            heads,
            rows.stride(0),
            rows.stride(1),
            self.eps,
            SIZE=size,
            BLOCK=self._block,
            HAS_BIAS=self._bias is not None,
            HAS_RESIDUAL=residual is not None,
            num_warps=self._warps,
        )
        return out
