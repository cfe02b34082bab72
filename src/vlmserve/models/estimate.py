"""Estimate a checkpoint's memory from its configuration and the shapes of its weights."""

from __future__ import annotations

from pathlib import Path

import torch

from vlmserve.devices.choice import open_device
from vlmserve.layers.linear import META
from vlmserve.models.registry import Description
from vlmserve.models.weights import Checkpoint
from vlmserve.quant.model import expected_memory
from vlmserve.settings.quantization import QuantizationConfig

BLOCK_SIZE = 16
"""Tokens of the KV block that is measured."""


class MemoryEstimate:
    """The memory of a checkpoint on a device. kernels: see `check_kernels`.

    folder: not quantized, or GGUF, which counts as dequantized. Raises like `load_model`, and ConfigurationError for a
    quantized checkpoint.
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
        """Maximum context in tokens."""

    @property
    def token_bytes(self) -> float:
        return self._decoder.cache_bytes(BLOCK_SIZE).block / BLOCK_SIZE

    def weights(self, config: QuantizationConfig | None) -> int:
        """Bytes of the weights. config: how they are quantized at load."""
        return expected_memory(self.model, self.device, config)

    def cache(self, weights: int, fraction: float) -> int:
        """Bytes left for the KV cache. fraction: `memory_fraction`."""
        return max(0, self.device.expected_cache(fraction, weights))
