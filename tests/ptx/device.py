"""The device of NVIDIA's GPUs without one.

Its kernels are compiled and run in the emulator, its graphs are recordings of what was launched, and data flows as in
`tests.static_device`.
"""

from __future__ import annotations

import pytest
import torch

from tests.ptx.recording import RecordingCapture
from tests.static_device import StaticDevice
from vlmserve.devices.cuda import TritonDevice
from vlmserve.devices.device import Device, LayerExecutor
from vlmserve.devices.graphs import Captures, GraphExecutor


class EmulatedDevice(StaticDevice, TritonDevice):
    """Memory, copies and steps of `StaticDevice`; operations, sampling and graphs of `TritonDevice`."""

    linear = TritonDevice.linear
    table = TritonDevice.table
    norm = TritonDevice.norm
    attention = TritonDevice.attention
    encoder_ranges = TritonDevice.encoder_ranges
    draw = TritonDevice.draw
    draw_later = TritonDevice.draw_later
    gpu_uuid = Device.gpu_uuid
    clock = Device.clock
    cache_budget = Device.cache_budget
    graph_bytes = Device.graph_bytes
    expected_cache = Device.expected_cache

    def __init__(self, torch_device: torch.device) -> None:
        with pytest.MonkeyPatch.context() as patch:
            # That of a GPU asks CUDA for memory.
            patch.setattr(TritonDevice, "__init__", Device.__init__)
            super().__init__(torch_device)
        self._captures = Captures(RecordingCapture(), repeats=self.captures_repeats)
        self._draw = None

    def executor(self) -> LayerExecutor:
        """See `Device.executor`."""
        self.executors.append(GraphExecutor(self._captures))
        return self.executors[-1]
