"""How much memory a checkpoint will take, from its configuration and the shapes of its weights."""

from __future__ import annotations

from pathlib import Path

import torch

from vlmserve.devices.choice import open_device
from vlmserve.layers.linear import META
from vlmserve.models.registry import Description
from vlmserve.models.weights import Checkpoint
from vlmserve.quant.model import expected_memory
from vlmserve.quantization import QuantizationConfig

BLOCK_SIZE = 16
"""Tokens of the block of keys and values that is measured."""


class MemoryEstimate:
    """The memory of a checkpoint that is not loaded, on a device by its kernels (see `check_kernels`).

    folder: in Hugging Face layout, not quantized, or GGUF, as if it were dequantized.
    dtype: in which the model would run. max_position: the longest context.
    Raises what `load_model` raises, and ConfigurationError for a checkpoint that is quantized already.
    """

    def __init__(self, folder: Path, device: torch.device, kernels: str = "auto") -> None:
        description = Description.read_plain(folder)
        checkpoint = Checkpoint(folder, description.rename)
        with description.errors():
            spec = description.spec(checkpoint)
            self.device, self.dtype = open_device(device, kernels, description.dtype(checkpoint), automatic=True)
            backend = self.device.attention(spec.attention, self.dtype, cache_type="auto")
            parts = description.build(spec, backend, dtype=self.dtype, device=META)
        self.model, self._decoder = parts.modules, parts.language_model
        self.max_position = spec.max_position

    @property
    def token_bytes(self) -> float:
        return self._decoder.cache_bytes(BLOCK_SIZE).block / BLOCK_SIZE

    def weights(self, config: QuantizationConfig | None) -> int:
        """Bytes of the weights; config: how they are quantized; None: they are not."""
        return expected_memory(self.model, self.device, config)

    def cache(self, weights: int, fraction: float) -> int:
        """Bytes that the KV cache can take beside so many bytes of weights; fraction: `memory_fraction`."""
        return max(0, self.device.expected_cache(fraction, weights))
