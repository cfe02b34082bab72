"""torch's 4-bit matmul, part of its CUDA builds."""

from __future__ import annotations

import torch
from torch import Tensor

from vlmserve.kernels.operations import Epilogue
from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.kernels.torch_products import TorchLinearKernel

GROUP_SIZES = (32, 64, 128, 256)


def unsupported_reason(weight: QuantizedWeight, dtype: torch.dtype) -> str | None:
    if weight.bits != 4 or weight.group_size not in GROUP_SIZES:
        return f"torch's 4-bit matmul does not support {weight.bits}-bit groups of {weight.group_size}"
    if dtype != torch.bfloat16:
        return f"torch's 4-bit matmul does not support {dtype}"
    out_features, in_features = weight.shape
    if out_features % 8 or in_features % weight.group_size or in_features % 32:
        return f"torch's 4-bit matmul does not support {out_features} x {in_features} weights"
    return None


class Int4LinearKernel(TorchLinearKernel):
    """A 4-bit weight for bfloat16 inputs, with scales and zero points rounded to bfloat16.

    The weight must pass `unsupported_reason`.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, epilogue: Epilogue) -> None:
        super().__init__(bias, epilogue)
        in_features = weight.shape[1]
        self._group_size = weight.group_size
        self._on_gpu = weight.values.is_cuda
        tiles = next(count for count in (8, 4, 2) if in_features % (16 * count) == 0)
        if self._on_gpu:
            octets = weight.values[:, ::2] << 4 | weight.values[:, 1::2]
            self._packed = torch.ops.aten._convert_weight_to_int4pack(octets.contiguous(), tiles)
        else:
            self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.values.int(), tiles)
        # torch computes ``scale * (q - 8) + zero``.
        zeros = weight.minimums + 8 * weight.scales
        self._scales = torch.stack((weight.scales.T, zeros.T), -1).to(torch.bfloat16).contiguous()

    @property
    def num_bytes(self) -> int:
        return int(self._packed.nbytes + self._scales.nbytes)

    def _multiply(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        multiply = torch.ops.aten._weight_int4pack_mm if self._on_gpu else torch.ops.aten._weight_int4pack_mm_for_cpu
        output: Tensor = multiply(flat, self._packed, self._group_size, self._scales)
        output = output.view(*x.shape[:-1], -1)
        return output if self._bias is None else output + self._bias
