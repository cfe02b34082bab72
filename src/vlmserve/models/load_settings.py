"""How a checkpoint becomes a model in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vlmserve.config import ModelImplementation
from vlmserve.layer_specs import CacheType
from vlmserve.quantization import QuantizationConfig


@dataclass(frozen=True)
class LoadSettings:
    """What decides how a model computes, beside its checkpoint."""

    device: torch.device
    dtype: torch.dtype | None = None
    """None: the checkpoint's own where the device computes it well. A CPU never runs float16: it takes bfloat16 if it
    has instructions for it or the native kernels run, else float32."""
    kernels: str = "auto"
    """See `check_kernels`."""
    implementation: ModelImplementation = "auto"
    """The one of "transformers" where "auto" finds none of our own."""
    quantization: QuantizationConfig | None = None
    """Of weights at load. None: weights stay as the checkpoint has them. Quantized weights of a GGUF file stay
    quantized on devices that keep them so, unless `dtype` is float32, which is exact."""
    input_bits: int | None = None
    """Bits of inputs that native kernels multiply with quantized weights of a checkpoint, 8 or 16. None: by format."""
    cache_type: CacheType = "auto"
    """How the KV cache stores keys and values."""

    def __post_init__(self) -> None:
        if self.quantization is not None and not self.quantization.wanted:
            object.__setattr__(self, "quantization", None)
