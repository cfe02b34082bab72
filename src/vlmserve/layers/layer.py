"""The base of modules that run on a device's kernels."""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import nn

from vlmserve.kernels.operations import Operations


class Factory(TypedDict):
    """Keyword arguments of new tensors."""

    dtype: torch.dtype
    device: torch.device


class Layer(nn.Module):
    """Runs the device's kernels after `arrange`, torch's operations before."""

    def arrange(self, operations: Operations) -> None:
        raise NotImplementedError


def arrange_layers(model: nn.Module, operations: Operations) -> None:
    for module in model.modules():
        if isinstance(module, Layer):
            module.arrange(operations)


def allocate(module: nn.Module, device: torch.device) -> None:
    """Allocate own parameters that are on the meta device."""
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.is_meta:
            setattr(module, name, nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False))
