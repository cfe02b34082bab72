"""Apple's GPUs, with torch's operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from vlmserve.devices.device import Device
from vlmserve.errors import ConfigurationError
from vlmserve.kernels.attention import AttentionBackend
from vlmserve.layer_specs import AttentionSpec, CacheType


class MpsDevice(Device):
    def attention(
        self, layers: Sequence[AttentionSpec], dtype: torch.dtype, *, cache_type: CacheType = "auto"
    ) -> AttentionBackend:
        if cache_type == "fp8":
            raise ConfigurationError("--kv-cache-dtype fp8: Metal has no 8-bit floats; use int8")
        return super().attention(layers, dtype, cache_type=cache_type)

    def cache_budget(self, fraction: float, largest_step: Callable[[], None], reserved: int = 0) -> int:
        """The driver's allocation after the largest step is its peak: torch keeps freed memory."""
        largest_step()
        torch.mps.synchronize()
        held = torch.mps.driver_allocated_memory()
        return int(torch.mps.recommended_max_memory() * fraction) - held - reserved

    def expected_cache(self, fraction: float, weights: int) -> int:
        return int(torch.mps.recommended_max_memory() * fraction) - weights
