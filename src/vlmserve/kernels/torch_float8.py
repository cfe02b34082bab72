"""torch's float8 matmul, for NVIDIA GPUs from compute capability 8.9."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmserve.kernels.operations import Epilogue
from vlmserve.kernels.quantized import FLOAT8, QuantizedWeight
from vlmserve.kernels.torch_products import TorchLinearKernel

LARGEST = torch.finfo(FLOAT8).max
LEAST_CAPABILITY, ROWS_CAPABILITY = (8, 9), (9, 0)
"""Minimum for one scale per matrix, and for one scale per row."""


def unsupported_reason(weight: QuantizedWeight, capability: tuple[int, int]) -> str | None:
    if not weight.is_float8:
        return "it is not float8"
    if capability < LEAST_CAPABILITY:
        return f"float8 matmuls need compute capability 8.9, and this GPU has {capability[0]}.{capability[1]}"
    if weight.shape[0] % 16 or weight.shape[1] % 16:
        return f"float8 matmuls do not support {weight.shape[0]} x {weight.shape[1]} weights"
    if capability < ROWS_CAPABILITY and not _has_one_scale(weight):
        return "matmuls with a scale per output need compute capability 9.0"
    return None


def _has_one_scale(weight: QuantizedWeight) -> bool:
    return bool((weight.scales == weight.scales[0]).all())


class Float8LinearKernel(TorchLinearKernel):
    """One scale, or one per output.

    Inputs are rounded with a scale per row, or with one scale if the weight has one. The weight must pass
    `unsupported_reason`.
    """

    def __init__(
        self, weight: QuantizedWeight, bias: Tensor | None, epilogue: Epilogue, dtype: torch.dtype, *, by_rows: bool
    ) -> None:
        """by_rows: the device supports scales per row."""
        super().__init__(bias, epilogue)
        self._values = weight.values.view(FLOAT8).contiguous()
        self._by_rows, self._dtype = by_rows, dtype
        self._scales = (weight.scales.T if by_rows else weight.scales[:1]).float().contiguous()

    @property
    def num_bytes(self) -> int:
        return self._values.nbytes + self._scales.nbytes

    def rows(self, indices: Tensor) -> Tensor:
        # torch cannot index float8
        values = F.embedding(indices, self._values.view(torch.uint8)).view(FLOAT8).float()
        scales = self._scales[0, indices][:, None] if self._by_rows else self._scales
        return (values * scales).to(self._dtype)

    def _round(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return float8 rows and float32 scales ``[rows, 1]``, or ``[1, 1]`` for all rows."""
        flat = x.float()
        largest = flat.abs().amax(1, keepdim=True) if self._by_rows else flat.abs().amax().view(1, 1)
        scales = largest.clamp(min=1e-12) / LARGEST
        return (flat / scales).clamp(-LARGEST, LARGEST).to(FLOAT8), scales

    def _multiply(self, x: Tensor) -> Tensor:
        output = self._of_rounded(*self._round(x.reshape(-1, x.shape[-1])))
        return output.view(*x.shape[:-1], output.shape[1])

    def _of_rounded(self, values: Tensor, scales: Tensor) -> Tensor:
        """Return ``[rows, out_features]`` with bias. values, scales: see `_round`."""
        output = torch._scaled_mm(
            values, self._values.t(), scale_a=scales, scale_b=self._scales, out_dtype=torch.bfloat16
        ).to(self._dtype)
        return output if self._bias is None else output + self._bias
