from __future__ import annotations

from dataclasses import dataclass

import torch

from vlmserve.layer_specs import CacheType
from vlmserve.settings.config import ModelImplementation
from vlmserve.settings.quantization import QuantizationConfig


@dataclass(frozen=True)
class LoadSettings:
    """Settings that affect a model's results, besides its checkpoint."""

    device: torch.device
    dtype: torch.dtype | None = None
    """None: the checkpoint's dtype if the device supports it well. A CPU never runs float16: it takes bfloat16 if it
    has instructions for it or the native kernels run, else float32.
    """
    kernels: str = "auto"
    implementation: ModelImplementation = "auto"
    """"auto": our own implementation, else "transformers"."""
    quantization: QuantizationConfig | None = None
    """Quantization at load; None: weights stay as in the checkpoint. Quantized GGUF weights stay quantized on devices
    that support it, unless `dtype` is float32, which is exact.
    """
    input_bits: int | None = None
    """Bits of activations for quantized weights of a checkpoint, 8 or 16; None: by format."""
    cache_type: CacheType = "auto"
    drafts: bool = False
    """Load the layer for multi-token prediction, which drafts, if the checkpoint has one."""

    def __post_init__(self) -> None:
        if self.quantization is not None and not self.quantization.wanted:
            object.__setattr__(self, "quantization", None)
