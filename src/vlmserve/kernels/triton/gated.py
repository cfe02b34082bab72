"""Epilogue of a matmul with many rows: activation, gate and residual in one launch."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from vlmserve.kernels.triton.activations import activate
from vlmserve.kernels.triton.dependent import wait_for_previous
from vlmserve.kernels.triton.host_math import cdiv
from vlmserve.kernels.triton.launching import Kernel

BLOCK = 1024

Layout = Literal["", "pairs", "halves"]
"""Inputs of an activation: "" without gates, "pairs" with alternating gates and ups, "halves" with gates before ups."""


@triton.jit
def load_activated(x_ptr, first, width, ACTIVATION: tl.constexpr, LAYOUT: tl.constexpr, COUNT: tl.constexpr):
    """Load ``first <= i < first + COUNT`` of a row in float32. Values past `width` come from zeros."""
    columns = first + tl.arange(0, COUNT)
    if LAYOUT == "pairs":
        places = 2 * first + tl.arange(0, 2 * COUNT)
        both = tl.load(x_ptr + places, places < 2 * width, 0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(both, (COUNT, 2)))
        x = activate(gate, ACTIVATION) * up
    else:
        x = activate(tl.load(x_ptr + columns, columns < width, 0.0).to(tl.float32), ACTIVATION)
        if LAYOUT == "halves":
            x *= tl.load(x_ptr + width + columns, columns < width, 0.0).to(tl.float32)
    return x


@Kernel
@triton.jit
def activate_rows(
    x_ptr, residual_ptr, out_ptr, width, ACTIVATION: tl.constexpr, LAYOUT: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """width: of results. Gated rows are twice as wide."""
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)
    inside = columns < width
    of_row = x_ptr + row * (width if LAYOUT == "" else 2 * width)
    result = load_activated(of_row, first, width, ACTIVATION, LAYOUT, BLOCK)
    if HAS_RESIDUAL:
        result += tl.load(residual_ptr + row * width + columns, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + row * width + columns, result.to(out_ptr.dtype.element_ty), inside)


def finish(
    x: Tensor,
    activation: str | None,
    *,
    layout: Layout,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return ``activation(x)`` or ``activation(gate) * up``, plus a residual.

    x: ``[rows, width]``, twice as wide with gates. dtype: of the result (default: of x).
    """
    rows, width = x.shape
    width //= 2 if layout else 1
    out = torch.empty((rows, width), dtype=dtype or x.dtype, device=x.device)
    if rows:
        activate_rows[(rows, cdiv(width, BLOCK))](
            x.contiguous(),
            out if residual is None else residual.contiguous(),
            out,
            width,
            ACTIVATION=activation or "",
            LAYOUT=layout,
            HAS_RESIDUAL=residual is not None,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return out
