"""The base of modules that a device computes.

Layers hold plain weights until all are loaded. Then `arrange_layers` hands each weight to the device, which stores it
as its kernels multiply it. No layer asks what kind of device that is.
"""

from __future__ import annotations

import torch
from torch import nn

from vlmserve.kernels.operations import Operations


class Layer(nn.Module):
    """A module that computes by the device's kernels once it is arranged, and by torch's operations before."""

    def arrange(self, operations: Operations) -> None:
        """Compute by these kernels from now on."""
        raise NotImplementedError


def arrange_layers(model: nn.Module, operations: Operations) -> None:
    for module in model.modules():
        if isinstance(module, Layer):
            module.arrange(operations)


def allocate(module: nn.Module, device: torch.device) -> None:
    """Give memory to parameters of a module, without those inside it, that have none."""
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.is_meta:
            setattr(module, name, nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False))
