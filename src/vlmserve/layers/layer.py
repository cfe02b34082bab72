"""The base of modules that a device computes.

Layers hold plain weights until all are loaded. Then `arrange_layers` hands each weight to the device, which stores it
as its kernels multiply it. No layer asks what kind of device that is.
"""

from __future__ import annotations

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
