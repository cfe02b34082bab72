"""The type in which pixie is trained: bfloat16, but float32 on CPUs that have no instructions for bfloat16, where its
products take many times as long."""

from __future__ import annotations

import torch

from vlmserve.kernels.choice import multiplies_bfloat16


def parameter_dtype(device: torch.device) -> torch.dtype:
    """Of a module whose float32 originals an optimizer keeps."""
    return torch.float32 if device.type == "cpu" and not multiplies_bfloat16() else torch.bfloat16


def autocast() -> torch.autocast:
    """For modules that stay float32 on a CPU."""
    return torch.autocast("cpu", torch.bfloat16, enabled=multiplies_bfloat16())
