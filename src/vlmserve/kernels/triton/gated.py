"""What follows on a product of many rows: activation, gate and residual, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vlmserve.kernels.triton.activations import activate
from vlmserve.kernels.triton.dependent import wait_for_previous
from vlmserve.kernels.triton.host_math import cdiv
from vlmserve.kernels.triton.launching import Kernel

BLOCK = 1024


@Kernel
@triton.jit
def activate_rows(
    x_ptr, residual_ptr, out_ptr, width, ACTIVATION: tl.constexpr, GATED: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """`BLOCK` results of a row a program. width: of results; rows of gates and ups, one beside the other, are twice as
    wide."""
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    if GATED:
        pairs = tl.arange(0, 2 * BLOCK) + tl.program_id(1) * (2 * BLOCK)
        both = tl.load(x_ptr + row * 2 * width + pairs, pairs < 2 * width, 0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(both, (BLOCK, 2)))
        result = activate(gate, ACTIVATION) * up
    else:
        result = activate(tl.load(x_ptr + row * width + columns, inside, 0.0).to(tl.float32), ACTIVATION)
    if HAS_RESIDUAL:
        result += tl.load(residual_ptr + row * width + columns, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + row * width + columns, result.to(out_ptr.dtype.element_ty), inside)


def finish(
    x: Tensor, activation: str | None, *, gated: bool, residual: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """``activation(x)``, or ``activation(gate) * up`` of rows ``[gate 0, up 0, gate 1, up 1, ...]``, plus a residual.

    x: ``[rows, width]``, twice as wide where it is gated. activation: one of `ACTIVATIONS`; None: none. residual:
    ``[rows, width]``. dtype: of the result; None: that of x.
    """
    rows, width = x.shape
    width //= 2 if gated else 1
    out = torch.empty((rows, width), dtype=dtype or x.dtype, device=x.device)
    if rows:
        activate_rows[(rows, cdiv(width, BLOCK))](
            x.contiguous(),
            out if residual is None else residual.contiguous(),
            out,
            width,
            ACTIVATION=activation or "",
            GATED=gated,
            HAS_RESIDUAL=residual is not None,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return out
