"""Small tensors from the host to a device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device. A GPU gets it through pinned memory, which torch keeps until it is copied: the
    host would wait for all that the device has to do if it was copied from any other memory."""
    if device.type != "cuda" or tensor.device == device:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
