"""float8 matmuls by torch, with fused rounding and epilogues."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from vlmserve.kernels.operations import Epilogue, RoundedRows, Rounding
from vlmserve.kernels.quantized import FLOAT8, QuantizedWeight
from vlmserve.kernels.torch_float8 import Float8LinearKernel
from vlmserve.kernels.triton.activations import ACTIVATIONS
from vlmserve.kernels.triton.gated import Layout, finish
from vlmserve.kernels.triton.rounding import round_rows


class TritonFloat8LinearKernel(Float8LinearKernel):
    """A `Float8LinearKernel` with one scale per output and per input row. A `RoundingLinearKernel`."""

    fuses: ClassVar[bool] = True
    """The preceding norm or activation rounds its inputs. False, for measurements: the matmul rounds them."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, epilogue: Epilogue, dtype: torch.dtype) -> None:
        super().__init__(weight, bias, epilogue, dtype, by_rows=True)
        self._epilogue = epilogue
        self._layout: Layout = "halves" if epilogue.gated else ""
        self._activates = epilogue.activation is None or epilogue.activation in ACTIVATIONS

    def rounding(self, rows: int) -> Rounding | None:
        return "float8" if self.fuses else None

    def of_rounded(self, x: RoundedRows, residual: Tensor | None = None) -> Tensor:
        return self._finish(self._of_rounded(x.values.view(FLOAT8), x.scales), residual)

    def rounded(self, x: Tensor | RoundedRows, rounding: Rounding) -> RoundedRows | None:
        if not self._activates:
            return None
        output = self._multiply(x) if isinstance(x, Tensor) else self._of_rounded(x.values.view(FLOAT8), x.scales)
        return round_rows(output, rounding, self._epilogue.activation, self._layout)

    def _round(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rounded = round_rows(x, "float8")
        return rounded.values.view(FLOAT8), rounded.scales

    def _finish(self, output: Tensor, residual: Tensor | None) -> Tensor:
        epilogue = self._epilogue
        if not self._activates or (epilogue.activation is None and not epilogue.gated):
            return super()._finish(output, residual)
        dtype = torch.float32 if epilogue.float_output else output.dtype
        added = None if residual is None else residual.reshape(-1, residual.shape[-1])
        flat = output.reshape(-1, output.shape[-1])
        result = finish(flat, epilogue.activation, layout=self._layout, residual=added, dtype=dtype)
        return result.view(*output.shape[:-1], result.shape[1])
