"""Image encoding speed of this machine, measured once per model and stored."""

from __future__ import annotations

import math

from vlmserve.image_cost import ImageCost
from vlmserve.kernels.trials import machine
from vlmserve.models.protocols import LoadedModel
from vlmserve.remembered import Remembered

SPEEDS = Remembered("image-speed.json", float)
"""Seconds per MAC, by model and machine."""
STEPS_PER_OCTAVE = 4
"""Rounding gives equal machines equal budgets."""


def image_cost(model: LoadedModel, identity: bytes, macs: int, seconds: float) -> ImageCost | None:
    """Return the time of images by area. None: all images have one size, or the tower cannot be measured.

    identity: of the model and its settings. macs, seconds: of part of a small image.
    """
    tower = model.vision
    if tower is None or not macs or not seconds:
        return None
    small, large = tower.example_shape, tower.larger_shape
    if small is None or large is None:
        return None
    device = model.device
    key = f"{identity.hex()[:16]} {device.torch_device.type} {device.kernels} {model.dtype} {machine()}"
    per_mac = SPEEDS.get(f"{key} {device.gpu_uuid}", lambda: _rounded(seconds / macs))
    return ImageCost.of((_area(small), tower.products(small)), (_area(large), tower.products(large)), per_mac)


def _area(shape: tuple[int, ...]) -> int:
    return shape[0] * shape[2] * shape[3]


def _rounded(per_mac: float) -> float:
    return float(2 ** (round(STEPS_PER_OCTAVE * math.log2(per_mac)) / STEPS_PER_OCTAVE))
