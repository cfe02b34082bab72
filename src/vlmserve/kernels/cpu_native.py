"""The native kernels for a CPU: products with packed weights, and norms.

The extension is optional: where it was not built, or cannot serve a type, layers use torch. Its functions take
addresses and sizes, which costs a call less than torch's dispatcher would; shapes are checked here.
"""

from __future__ import annotations

import importlib
import logging
import os
from types import ModuleType

import torch
from torch import Tensor

from vlmserve.errors import ConfigurationError
from vlmserve.kernels.quantized import QuantizedWeight

_native: ModuleType | None
try:
    _native = importlib.import_module("vlmserve.kernels._native")
except ImportError:
    _native = None

logger = logging.getLogger(__name__)

VARIABLE = "VLMSERVE_KERNELS"
CHOICES = ("auto", "torch", "native")
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
ACTIVATIONS = {
    "silu": 1,
    "swish": 1,
    "gelu": 2,
    "gelu_new": 3,
    "gelu_pytorch_tanh": 3,
    "quick_gelu": 4,
    "relu": 5,
}
"""Activations that a product applies on its way out, by their Hugging Face names."""


def supported_isas() -> tuple[str, ...]:
    """Instruction sets that this processor and this build have, the best first; empty without the extension."""
    return () if _native is None else tuple(_native.supported_isas())


def choose_kernels(choice: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether to run native kernels, and which.

    choice: "torch", "native", one of `supported_isas`, or "auto", which asks the environment (``VLMSERVE_KERNELS``) and
    else takes the best there is. Raises ConfigurationError for kernels that this machine does not have.
    """
    if choice == "auto":
        choice = os.environ.get(VARIABLE) or "auto"
    isas = supported_isas()
    if choice not in (*CHOICES, *isas):
        known = ", ".join((*CHOICES, *isas))
        raise ConfigurationError(f"kernels {choice!r} are not there on this machine; choose one of {known}")
    if choice == "native" and not isas:
        raise ConfigurationError("the native kernels were not built: install vlmserve where there is a C++ compiler")
    if choice == "torch" or device.type != "cpu" or dtype not in DTYPES:
        return False
    if not isas:
        logger.info("kernels: torch (no native ones: vlmserve was installed without a C++ compiler)")
        return False
    isa = isas[0] if choice in CHOICES else choice
    extension().select_isa(isa)
    logger.info("kernels: native, %s", isa)
    return True


def can_pack(in_features: int, dtype: torch.dtype) -> bool:
    """Whether a weight with so many input features can be packed: bfloat16 comes in pairs."""
    return dtype == torch.float32 or (dtype == torch.bfloat16 and in_features % 2 == 0)


def extension() -> ModuleType:
    """The compiled module. Raises RuntimeError where it was not built."""
    if _native is None:
        raise RuntimeError("the native kernels were not built")
    return _native


TILE = 32
"""Output features that lie together in a packed weight; of a gated one, half are gates."""


class PackedLinear:
    """A weight ``[out_features, in_features]`` in the kernel's order, with what follows the product.

    dtype: of inputs and outputs; default: a plain weight's. gated: the weight's first half are gates, its second half
    ups; the output is ``activation(gate) * up``, half as wide. bias: ``[out_features]``, not with gated. float_output:
    results in float32, whatever the inputs are.
    """

    __slots__ = (
        "_activation",
        "_bias",
        "_bits",
        "_dtype",
        "_gated",
        "_group_size",
        "_linear",
        "_packed",
        "dtype",
        "in_features",
        "out_features",
        "output_dtype",
        "output_features",
    )

    def __init__(
        self,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        activation: str | None = None,
        gated: bool = False,
        float_output: bool = False,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.output_features = self.out_features // 2 if gated else self.out_features
        self.dtype = dtype or (weight.dtype if isinstance(weight, Tensor) else torch.float32)
        self.output_dtype = torch.float32 if float_output else self.dtype
        if not can_pack(self.in_features, self.dtype) or (gated and (bias is not None or self.out_features % 2)):
            raise ValueError(f"a weight {tuple(weight.shape)} of {self.dtype} cannot be packed")
        self._dtype = DTYPES[self.dtype]
        self._activation = 0 if activation is None else ACTIVATIONS[activation]
        self._gated = int(gated)
        self._bias = bias
        self._linear = extension().linear
        self._bits = 0 if isinstance(weight, Tensor) else weight.bits
        self._group_size = 0 if isinstance(weight, Tensor) else weight.group_size
        self._packed = self._pack(weight)

    def _pack(self, weight: Tensor | QuantizedWeight) -> Tensor:
        num_tiles = -(-self.output_features // (TILE // 2 if self._gated else TILE))
        sizes = (self.out_features, self.in_features)
        if isinstance(weight, Tensor):
            if weight.dtype != self.dtype:
                raise ValueError(f"a plain weight of {weight.dtype} does not compute in {self.dtype}")
            packed = torch.empty(num_tiles * TILE * self.in_features, dtype=self.dtype)
            extension().pack(weight.contiguous().data_ptr(), packed.data_ptr(), *sizes, self._dtype, self._gated)
            return packed
        if weight.bits == 8:
            tile_bytes = TILE * (4 + -(-self.in_features // 4) * 4)
        else:
            tile_bytes = -(-self.in_features // weight.group_size) * TILE * (4 + weight.group_size // 2)
        packed = torch.empty(num_tiles * tile_bytes, dtype=torch.uint8)
        values, scales, shifts = (tensor.contiguous() for tensor in (weight.values, weight.scales, weight.shifts))
        extension().pack_quantized(
            values.data_ptr(),
            scales.data_ptr(),
            shifts.data_ptr(),
            packed.data_ptr(),
            *sizes,
            weight.bits,
            weight.group_size,
            self._gated,
        )
        return packed

    @property
    def num_bytes(self) -> int:
        """Memory of the packed weight."""
        return self._packed.nbytes

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """``[..., in_features]`` to ``[..., output_features]``; `residual`, shaped like the output, is added to it."""
        shape = x.shape
        if shape[-1] != self.in_features or x.dtype != self.dtype:
            raise ValueError(f"{tuple(shape)} of {x.dtype} does not fit a weight for {self.in_features} {self.dtype}")
        if len(shape) != 2 or x.stride(1) != 1:
            x = x.reshape(-1, self.in_features).contiguous()
        rows = x.shape[0]
        output = torch.empty((*shape[:-1], self.output_features), dtype=self.output_dtype)
        if rows == 0:
            return output
        if residual is not None:
            if residual.shape != output.shape or residual.dtype != self.dtype:
                raise ValueError(f"a residual {tuple(residual.shape)} of {residual.dtype} is not like the output")
            residual = residual.contiguous()
        self._linear(
            x.data_ptr(),
            self._packed.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            output.data_ptr(),
            rows,
            self.in_features,
            self.out_features,
            x.stride(0),
            self.output_features,
            self._dtype,
            self._activation,
            self._gated,
            int(self.output_dtype != self.dtype),
            torch.get_num_threads(),
            self._bits,
            self._group_size,
        )
        return output

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the weight, ``[count, in_features]``, by int64 indices ``[count]``; not of one in 4 bits."""
        if self._bits == 4:
            raise ValueError("single rows of a weight in 4 bits cannot be read")
        indices = indices.contiguous()
        output = torch.empty(len(indices), self.in_features, dtype=self.dtype)
        extension().gather(
            self._packed.data_ptr(),
            indices.data_ptr(),
            output.data_ptr(),
            len(indices),
            self.in_features,
            self._dtype,
            self._bits,
        )
        return output


class NativeNorm:
    """RMSNorm, or LayerNorm where there is a bias, over the last axis; weight and bias: ``[size]``."""

    __slots__ = ("_bias", "_dtype", "_eps", "_norm", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self._norm = extension().norm
        self._weight, self._bias, self._eps = weight, bias, eps
        self._dtype = DTYPES[weight.dtype]

    def __call__(self, x: Tensor) -> Tensor:
        """``[..., size]`` to the same."""
        size = self._weight.shape[0]
        if x.shape[-1] != size or x.dtype != self._weight.dtype:
            raise ValueError(f"{tuple(x.shape)} of {x.dtype} does not fit a norm over {size} {self._weight.dtype}")
        x = x.contiguous()
        output = torch.empty_like(x)
        self._norm(
            x.data_ptr(),
            self._weight.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(),
            output.data_ptr(),
            x.numel() // size,
            size,
            self._eps,
            self._dtype,
            torch.get_num_threads(),
        )
        return output


def encoder_attention(qkv: Tensor, num_heads: int) -> Tensor:
    """Full attention within each picture: ``[pictures, tokens, 3 * size]``, queries before keys before values, to
    ``[pictures, tokens, size]``. The size of a head must be one that `can_pack` takes."""
    pictures, length, width = qkv.shape
    size = width // 3
    head_size = size // num_heads
    if 3 * num_heads * head_size != width or not can_pack(head_size, qkv.dtype):
        raise ValueError(f"{num_heads} heads of {qkv.dtype} cannot share {width} features")
    qkv = qkv.contiguous()
    output = torch.empty(pictures, length, size, dtype=qkv.dtype)
    if output.numel():
        extension().encoder_attention(
            qkv.data_ptr(),
            output.data_ptr(),
            pictures,
            length,
            num_heads,
            head_size,
            head_size**-0.5,
            DTYPES[qkv.dtype],
            torch.get_num_threads(),
        )
    return output
