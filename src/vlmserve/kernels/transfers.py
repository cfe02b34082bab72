"""Copies small tensors to a device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device. A GPU copies from pinned memory, which torch keeps until the copy is done; from
    other memory, the host would wait for all queued work."""
    if device.type != "cuda" or tensor.device == device:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
