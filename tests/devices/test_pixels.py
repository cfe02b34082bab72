"""Pixels of 8 bits become the same floats on a device as in transformers' processors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.normalized import of_levels
from vlmserve.devices import pixels as device_pixels
from vlmserve.devices.device import Device
from vlmserve.levels import Levels

KINDS = [
    Levels(1 / 255, (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    Levels(1 / 127.5, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    Levels(1 / 255, None, None),
    Levels(None, (123.0, 117.0, 104.0), (58.0, 57.0, 57.5)),
    Levels(None, None, None),
]


@pytest.mark.parametrize("levels", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pixel_normalization_equals_numpy_bitwise(levels, dtype, monkeypatch):
    monkeypatch.setattr(device_pixels, "BLOCK_ELEMENTS", 3 * 16 * 16 * 2)  # two of five tiles at a time
    draw = np.random.default_rng(0)
    pixels = np.stack([np.arange(256, dtype=np.uint8).reshape(16, 16)] * 3)[None].repeat(5, 0)
    pixels = draw.permuted(pixels, axis=3)
    pixels.flags.writeable = False
    device = Device(torch.device("cpu"))
    for _ in range(2):
        ours = device.upload_pixels(pixels, dtype, levels)
        assert torch.equal(ours, torch.from_numpy(of_levels(pixels, levels)).to(dtype))


def test_pixels_without_levels_are_only_converted():
    pixels = np.random.default_rng(0).standard_normal((1, 3, 4, 4), np.float32)
    ours = Device(torch.device("cpu")).upload_pixels(pixels, torch.float64)
    assert torch.equal(ours, torch.from_numpy(pixels).double())
