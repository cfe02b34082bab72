"""RMSNorm and LayerNorm, fused with the adjacent sums."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vlmserve.kernels.operations import Norm, NormedRows, RoundedRows, Rounding
from vlmserve.kernels.triton.dependent import wait_for_previous
from vlmserve.kernels.triton.host_math import next_power_of_2
from vlmserve.kernels.triton.launching import Kernel
from vlmserve.kernels.triton.rounding import GROUP, allocate_rounded, store_rounded

MAX_SIZE = 16384
"""Maximum elements of a row, which one program holds in registers."""


@triton.jit
def load_factors(weight_ptr, bias_ptr, columns, SIZE: tl.constexpr, HAS_BIAS: tl.constexpr):
    """In float32. Without a bias, weights twice."""
    weight = tl.load(weight_ptr + columns, columns < SIZE, 0.0).to(tl.float32)
    bias = weight
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, columns < SIZE, 0.0).to(tl.float32)
    return weight, bias


@triton.jit
def normed(x, weight, bias, eps, columns, SIZE: tl.constexpr, HAS_BIAS: tl.constexpr):
    """x must be 0 past `SIZE`."""
    if HAS_BIAS:
        x = tl.where(columns < SIZE, x - tl.sum(x, 0) / SIZE, 0.0)
    result = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps) * weight
    if HAS_BIAS:
        result += bias
    return result


@Kernel
@triton.jit
def norm_rows(
    x_ptr, first_weight_ptr, first_bias_ptr, first_eps, residual_ptr, sums_ptr, weight_ptr, bias_ptr, eps, out_ptr,
    scales_ptr, heads, stride_token, stride_head, SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_FIRST: tl.constexpr,
    FIRST_HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROUNDS: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Norm one row of `SIZE` elements per program, in float32. Rows are ``[tokens, heads]``.

    HAS_FIRST: apply a norm. HAS_RESIDUAL: then add a residual, and store the sum. HAS_NORM: norm the sum, or x, last.
    ROUNDS: a `Rounding`, or "".
    """
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    x = tl.load(x_ptr + row // heads * stride_token + row % heads * stride_head + columns, inside, 0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * SIZE + columns, inside, 0.0).to(tl.float32)
    # issue all loads before the first reduction, where warps wait
    if HAS_FIRST:
        first_weight, first_bias = load_factors(first_weight_ptr, first_bias_ptr, columns, SIZE, FIRST_HAS_BIAS)
    if HAS_NORM:
        weight, bias = load_factors(weight_ptr, bias_ptr, columns, SIZE, HAS_BIAS)
    if HAS_FIRST:
        x = normed(x, first_weight, first_bias, first_eps, columns, SIZE, FIRST_HAS_BIAS)
    if HAS_RESIDUAL:
        sums = (x + residual).to(sums_ptr.dtype.element_ty)
        tl.store(sums_ptr + row * SIZE + columns, sums, inside)
        x = sums.to(tl.float32)
    if HAS_NORM:
        result = normed(x, weight, bias, eps, columns, SIZE, HAS_BIAS)
        if ROUNDS == "":
            tl.store(out_ptr + row * SIZE + columns, result.to(out_ptr.dtype.element_ty), inside)
        else:
            result = tl.where(inside, result, 0.0).to(x_ptr.dtype.element_ty).to(tl.float32)
            store_rounded(result, out_ptr, scales_ptr, row, ROUNDS, SIZE, BLOCK)


class TritonNorm:
    """RMSNorm, or LayerNorm with a bias.

    weight, bias: ``[size]``; float32 is not rounded. Raises ValueError for rows longer than `MAX_SIZE`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        if len(weight) > MAX_SIZE:
            raise ValueError(f"a norm over {len(weight)} elements is larger than {MAX_SIZE}")
        self.weight, self._bias, self.eps = weight.contiguous(), bias, eps
        self._block = next_power_of_2(len(weight))
        self._warps = min(16, max(1, self._block // 512))

    @property
    def only_scales(self) -> bool:
        return self._bias is None

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._launch(x, norm=self, out=out)
        return out

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        sums = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._launch(x, first=self, residual=residual, sums=sums)
        return sums

    def of_sum(self, x: Tensor, residual: Tensor, first: Norm | None = None) -> NormedRows:
        assert first is None or isinstance(first, TritonNorm)
        sums, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
        self._launch(x, first=first, residual=residual, sums=sums, norm=self, out=out)
        return NormedRows(sums, out)

    def rounded(self, x: Tensor, rounding: Rounding) -> RoundedRows:
        out = allocate_rounded(x, rounding)
        self._launch(x, norm=self, out=out, rounding=rounding)
        return out

    def rounded_sum(
        self, x: Tensor, residual: Tensor, first: Norm | None, rounding: Rounding
    ) -> tuple[Tensor, RoundedRows]:
        assert first is None or isinstance(first, TritonNorm)
        sums, out = torch.empty(x.shape, dtype=x.dtype, device=x.device), allocate_rounded(x, rounding)
        self._launch(x, first=first, residual=residual, sums=sums, norm=self, out=out, rounding=rounding)
        return sums, out

    def _launch(
        self,
        x: Tensor,
        *,
        first: TritonNorm | None = None,
        residual: Tensor | None = None,
        sums: Tensor | None = None,
        norm: TritonNorm | None = None,
        out: Tensor | RoundedRows | None = None,
        rounding: Rounding | None = None,
    ) -> None:
        size = len(self.weight)
        rows = x if x.ndim == 3 else x.reshape(-1, 1, size)
        if rows.stride(2) != 1:
            rows = rows.contiguous()
        tokens, heads, _ = rows.shape
        if not tokens * heads:
            return
        before, after = first or self, norm or self
        results, scales = (out.values, out.scales) if isinstance(out, RoundedRows) else (out, None)
        norm_rows[(tokens * heads,)](
            rows,
            before.weight,
            before.weight if before._bias is None else before._bias,
            before.eps,
            rows if residual is None else residual.contiguous(),
            rows if sums is None else sums,
            after.weight,
            after.weight if after._bias is None else after._bias,
            after.eps,
            rows if results is None else results,
            rows if scales is None else scales,
            heads,
            rows.stride(0),
            rows.stride(1),
            SIZE=size,
            BLOCK=max(self._block, GROUP.value) if rounding == "int8" else self._block,
            HAS_FIRST=first is not None,
            FIRST_HAS_BIAS=first is not None and first._bias is not None,
            HAS_RESIDUAL=residual is not None,
            HAS_NORM=norm is not None,
            HAS_BIAS=norm is not None and norm._bias is not None,
            ROUNDS=rounding or "",
            num_warps=self._warps,
        )
