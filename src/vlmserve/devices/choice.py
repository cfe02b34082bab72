"""Chooses a model's device by `KINDS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from vlmserve.devices.cpu import open_cpu
from vlmserve.devices.cuda import open_cuda
from vlmserve.devices.device import Device
from vlmserve.devices.mps import MpsDevice
from vlmserve.errors import ConfigurationError
from vlmserve.kernels.choice import check_kernels, multiplies_bfloat16


class Open(Protocol):
    def __call__(
        self, torch_device: torch.device, kernels: str, stated: torch.dtype, *, automatic: bool
    ) -> tuple[Device, torch.dtype]: ...


def _of_any_type(device: Callable[[torch.device], Device]) -> Open:
    def opened(
        torch_device: torch.device, kernels: str, stated: torch.dtype, *, automatic: bool
    ) -> tuple[Device, torch.dtype]:
        return device(torch_device), stated

    return opened


KINDS: dict[str, Open] = {
    "cpu": open_cpu,
    "cuda": open_cuda,
    "mps": _of_any_type(MpsDevice),
}
"""By the type of torch device."""


def open_device(
    torch_device: torch.device, kernels: str, stated: torch.dtype, *, automatic: bool
) -> tuple[Device, torch.dtype]:
    """Return the device and the model's type.

    stated: the type in the settings or, if `automatic`, the checkpoint's, which may become a faster one. Raises
    ConfigurationError for missing kernels and unsupported devices.
    """
    if torch_device.type not in KINDS:
        raise ConfigurationError(f"--device {torch_device}: implemented are {', '.join(KINDS)}")
    return KINDS[torch_device.type](torch_device, check_kernels(kernels), stated, automatic=automatic)


def type_for_torch(torch_device: torch.device, stated: torch.dtype) -> torch.dtype:
    """Without 16-bit instructions, 16-bit types are up to 100x slower."""
    fast = torch_device.type != "cpu" or stated not in (torch.bfloat16, torch.float16) or multiplies_bfloat16()
    return stated if fast else torch.float32


def free_device_memory(device: torch.device) -> int | None:
    """None for main memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return torch.mps.recommended_max_memory() if device.type == "mps" else None


def find_device(name: str) -> torch.device:
    """Find a device, preferably a GPU for "auto". Raises ConfigurationError if it is missing."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(f"--device {name}: torch sees {torch.cuda.device_count()} CUDA devices here")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigurationError("--device mps: torch cannot use Metal on this machine")
    return device
