"""NVIDIA GPUs, and AMD GPUs with ROCm, which torch calls "cuda" as well."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from vlmserve.devices.device import Clock
from vlmserve.devices.torch_device import TorchDevice
from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.layers.operations import Epilogue, Product, Table
from vlmserve.layers.products import QuantizedProduct

logger = logging.getLogger(__name__)

BLOCK_ELEMENTS = 2**24
"""Quantized weights that are dequantized at a time: larger blocks take fewer launches."""


class CudaDevice(TorchDevice):
    """A GPU by torch's operations. It computes while the host goes on."""

    def __init__(self, torch_device: torch.device) -> None:
        """Make it before the model is loaded: the memory that is free now is what the model and its caches may take."""
        super().__init__(torch_device)
        self._free_before = torch.cuda.mem_get_info(torch_device)[0]
        self._allocated_before = torch.cuda.memory_allocated(torch_device)
        self._reserved_before = torch.cuda.memory_reserved(torch_device)

    @property
    def gpu_uuid(self) -> str | None:
        """See `Device.gpu_uuid`."""
        if torch.version.hip is not None:
            return None
        return f"GPU-{torch.cuda.get_device_properties(self.torch_device).uuid}"

    def linear(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None, epilogue: Epilogue, dtype: torch.dtype
    ) -> Product:
        """See `Operations.linear`."""
        if isinstance(weight, QuantizedWeight):
            return QuantizedProduct(weight, bias, epilogue, dtype, block_elements=BLOCK_ELEMENTS)
        return super().linear(weight, bias, epilogue, dtype)

    def table(self, weight: Tensor | QuantizedWeight, dtype: torch.dtype) -> Table:
        """See `Operations.table`."""
        if isinstance(weight, QuantizedWeight):
            epilogue = Epilogue(float_output=True)
            return QuantizedProduct(weight, None, epilogue, dtype, block_elements=BLOCK_ELEMENTS)
        return super().table(weight, dtype)

    def upload(self, values: np.ndarray) -> Tensor:
        """See `Device.upload`. Pinned memory is copied while the host goes on; torch keeps it and uses it again once
        the copy is done."""
        return torch.from_numpy(values).pin_memory().to(self.torch_device, non_blocking=True)

    def clock(self) -> Clock:
        """See `Device.clock`."""
        return EventClock(self.torch_device)

    def cache_budget(self, fraction: float, largest_step: Callable[[], None], reserved: int = 0) -> int:
        """See `Device.cache_budget`.

        Weights, activations and caches together take `fraction` of the GPU's memory, as in vLLM: what other processes
        hold counts only where less than that is left.
        """
        device = self.torch_device
        torch.cuda.reset_peak_memory_stats(device)
        largest_step()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - self._allocated_before
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - self._reserved_before
        beside_torch = max(0, self._free_before - free - held)
        wanted = int(total * fraction)
        if wanted > self._free_before:
            logger.warning(
                "%.1f of %.1f GiB are free on %s, less than --memory-fraction %g: the KV cache takes what is left",
                self._free_before / 2**30, total / 2**30, device, fraction,
            )  # fmt: skip
        return min(wanted, self._free_before) - peak - beside_torch - reserved


class EventClock:
    """Times of events that the device records. A `Clock`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self.mark()

    def mark(self) -> None:
        """See `Clock.mark`."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)

    def seconds(self) -> list[float]:
        """See `Clock.seconds`."""
        self._events[-1].synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(self._events)]
