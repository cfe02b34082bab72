"""Linears with torch: plain weights, weights in oneDNN's order, quantized weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmserve.kernels.activation import activation
from vlmserve.kernels.adapters import LinearAdapters
from vlmserve.kernels.choice import multiplies_bfloat16
from vlmserve.kernels.gguf_weight import GGUFWeight
from vlmserve.kernels.operations import NO_EPILOGUE, AnyWeight, Epilogue
from vlmserve.kernels.quantized import QuantizedWeight

PACKING_ROWS = 64
"""oneDNN picks the same weight order, fast for few and many rows, for any number of rows from this on."""
FEW_ROWS = 8
"""Up to this many rows, a bfloat16 matmul is limited by reading its weight."""
BLOCK_ELEMENTS = 2**21
"""Weights to dequantize at once on a CPU, chosen to fit its cache."""


class TorchLinearKernel:
    """Base of linears that torch computes: matmul, adapters, epilogue. bias: ``[out_features]``."""

    def __init__(self, bias: Tensor | None, epilogue: Epilogue) -> None:
        self._bias = bias
        self._activation = None if epilogue.activation is None else activation(epilogue.activation)
        self._gated = epilogue.gated
        self._float_output = epilogue.float_output

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        adapters: LinearAdapters | None = None,
    ) -> Tensor:
        output = self._multiply(x)
        if adapters is not None and adapters.active:
            output = adapters.change(x, output, self._bias)
        return self._finish(output, residual)

    def _finish(self, output: Tensor, residual: Tensor | None) -> Tensor:
        if self._gated:
            gate, output = output.chunk(2, -1)
            output = output if self._activation is None else self._activation(gate) * output
        elif self._activation is not None:
            output = self._activation(output)
        if self._float_output:
            output = output.float()
        return output if residual is None else output + residual

    @property
    def num_bytes(self) -> int:
        raise NotImplementedError

    def _multiply(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``, with bias."""
        raise NotImplementedError


class PlainLinearKernel(TorchLinearKernel):
    def __init__(self, weight: Tensor, bias: Tensor | None = None, epilogue: Epilogue = NO_EPILOGUE) -> None:
        super().__init__(bias, epilogue)
        self._weight = weight

    @property
    def num_bytes(self) -> int:
        return self._weight.nbytes

    def rows(self, indices: Tensor) -> Tensor:
        return F.embedding(indices, self._weight)

    def _multiply(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class UpcastLinearKernel(PlainLinearKernel):
    """Without bfloat16 instructions, large matmuls are faster in float32.

    Reading the weight limits matmuls of few rows, so they stay in bfloat16.
    """

    def _multiply(self, x: Tensor) -> Tensor:
        if x.numel() // x.shape[-1] <= FEW_ROWS:
            return super()._multiply(x)
        bias = None if self._bias is None else self._bias.float()
        return F.linear(x.float(), self._weight.float(), bias).to(x.dtype)


class ReorderedLinearKernel(TorchLinearKernel):
    """oneDNN's order saves half the time of matmuls with few rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, epilogue: Epilogue) -> None:
        super().__init__(bias, epilogue)
        self._num_bytes = weight.nbytes
        self._reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACKING_ROWS)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def _multiply(self, x: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._reordered, self._bias, "none", [], "")
        return output


class QuantizedLinearKernel(TorchLinearKernel):
    """Dequantizes each block of outputs right before its matmul, which bounds the extra memory.

    A byte holds two 4-bit weights: low bits for the first half of a block's outputs, high bits for the second half.
    """

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: Tensor | None,
        epilogue: Epilogue,
        dtype: torch.dtype,
        *,
        compute: torch.dtype | None = None,
        block_elements: int = BLOCK_ELEMENTS,
    ) -> None:
        super().__init__(bias, epilogue)
        self._dtype, self._compute = dtype, compute or dtype
        self._bits, self._group_size = weight.bits, weight.group_size
        self._out_features, in_features = weight.shape
        self._block_rows = max(2, block_elements // in_features // 2 * 2)
        # every matmul would read a transposed layout
        self._values = self._pack(weight.values) if weight.bits == 4 else weight.values.contiguous()
        self._scales, self._minimums = weight.scales.contiguous(), weight.minimums.contiguous()

    @property
    def num_bytes(self) -> int:
        return self._values.nbytes + self._scales.nbytes + self._minimums.nbytes

    def rows(self, indices: Tensor) -> Tensor:
        if self._bits == 8:
            values = self._values[indices]
        else:
            block, row = indices // self._block_rows, indices % self._block_rows
            half = (self._out_features - block * self._block_rows).clamp(max=self._block_rows).add(1) // 2
            packed = self._values[block * (self._block_rows // 2) + row % half]
            values = torch.where((row < half)[:, None], packed & 15, packed >> 4)
        return self._expand(values, self._scales[indices], self._minimums[indices], self._dtype)

    def _blocks(self) -> list[slice]:
        starts = range(0, self._out_features, self._block_rows)
        return [slice(start, min(start + self._block_rows, self._out_features)) for start in starts]

    def _pack(self, values: Tensor) -> Tensor:
        parts = []
        for outputs in self._blocks():
            block = values[outputs]
            half = -(-len(block) // 2)
            packed = block[:half].clone(memory_format=torch.contiguous_format)
            packed[: len(block) - half] |= block[half:] << 4
            parts.append(packed)
        return torch.cat(parts)

    def _unpack(self, outputs: slice) -> Tensor:
        if self._bits == 8:
            return self._values[outputs]
        count = outputs.stop - outputs.start
        half = -(-count // 2)
        packed = self._values[outputs.start // 2 :][:half]
        values = packed.new_empty(2 * half, packed.shape[1])
        torch.bitwise_and(packed, 15, out=values[:half])
        torch.bitwise_right_shift(packed, 4, out=values[half:])
        return values[:count]

    def _multiply(self, x: Tensor) -> Tensor:
        x = x.to(self._compute)
        parts = []
        for outputs in self._blocks():
            scales, minimums = self._scales[outputs], self._minimums[outputs]
            weight = self._expand(self._unpack(outputs), scales, minimums, self._compute)
            parts.append(F.linear(x, weight, None if self._bias is None else self._bias[outputs].to(self._compute)))
        output = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return output.to(self._dtype)

    def _expand(self, values: Tensor, scales: Tensor, minimums: Tensor, dtype: torch.dtype) -> Tensor:
        rows = QuantizedWeight(self._bits, self._group_size, values, scales, minimums)
        return rows.dequantize().to(dtype)


def torch_linear(
    weight: AnyWeight, bias: Tensor | None, epilogue: Epilogue, dtype: torch.dtype
) -> PlainLinearKernel | QuantizedLinearKernel:
    if isinstance(weight, GGUFWeight):
        weight = weight.dequantize().to(dtype)
    device = weight.values.device if isinstance(weight, QuantizedWeight) else weight.device
    slow = device.type == "cpu" and dtype == torch.bfloat16 and not multiplies_bfloat16()
    if isinstance(weight, QuantizedWeight):
        return QuantizedLinearKernel(weight, bias, epilogue, dtype, compute=torch.float32 if slow else None)
    return (UpcastLinearKernel if slow else PlainLinearKernel)(weight, bias, epilogue)


def torch_table(weight: AnyWeight, dtype: torch.dtype) -> PlainLinearKernel | QuantizedLinearKernel:
    if isinstance(weight, GGUFWeight):
        weight = weight.dequantize().to(dtype)
    epilogue = Epilogue(float_output=True)
    if isinstance(weight, QuantizedWeight):
        return QuantizedLinearKernel(weight, None, epilogue, dtype)
    return PlainLinearKernel(weight, None, epilogue)
