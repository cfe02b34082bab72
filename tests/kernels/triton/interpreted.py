"""Models by the kernels that a GPU gets, on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from vlmserve.devices import choice
from vlmserve.devices.cuda import TritonDevice
from vlmserve.devices.device import Device, EagerExecutor, LayerExecutor
from vlmserve.layers.norm import Normalization
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.protocols import LoadedModel
from vlmserve.models.registry import load_model

CPU = torch.device("cpu")


class InterpretedDevice(TritonDevice):
    """A GPU's kernels."""

    def __init__(self, torch_device: torch.device) -> None:
        Device.__init__(self, torch_device)

    def executor(self) -> LayerExecutor:
        """Layers run one by one."""
        return EagerExecutor()

    def upload(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        return Device.upload(self, arrays)


def loaded(folder: Path, device: type[Device], quantize: Any = None) -> LoadedModel:
    """A checkpoint in float32 on such a device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(choice.KINDS, "cpu", lambda on, kernels, stated, *, automatic: (device(on), stated))
        return load_model(folder, LoadSettings(device=CPU, dtype=torch.float32, quantization=quantize))


def randomize_norms(model: nn.Module, device: type[Device]) -> None:
    """Give all norms the same random weights and biases each time. device: on which it was loaded."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, Normalization):
            for parameter in module.parameters():
                parameter.data.uniform_(-1, 1)
            module.arrange(device(CPU))
