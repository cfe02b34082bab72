"""Patches rotated by row and column against what the formula says, one by one in float64."""

from __future__ import annotations

import math

import pytest
import torch

from tests.native import built
from vlmserve.devices.cpu import NativeCpuDevice
from vlmserve.kernels.extension import selected_isa
from vlmserve.layers.encoder_attention import EncoderAttention
from vlmserve.models.vision.rotation import patch_angles, rotate_heads, rotated


def test_many_patches_rotate_by_the_formula() -> None:
    rows, columns, heads, half = 20, 15, 3, 4
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    frequencies = 1 / 100 ** (torch.arange(0, half, 2) / half)
    cos, sin = patch_angles(row.flatten(), column.flatten(), frequencies, frequencies, torch.device("cpu"))
    qkv = torch.randn(rows * columns, 3 * heads * 2 * half)
    expected = qkv.double().view(rows, columns, 3, heads, 2, half).clone()
    for down in range(rows):
        for across in range(columns):
            for pair in range(half):
                angle = (down, across)[pair // 2] * frequencies[pair % 2].item()
                first, second = qkv.double().view_as(expected)[down, across, :2, :, :, pair].unbind(-1)
                expected[down, across, :2, :, 0, pair] = first * math.cos(angle) - second * math.sin(angle)
                expected[down, across, :2, :, 1, pair] = second * math.cos(angle) + first * math.sin(angle)
    output = rotate_heads(qkv.clone(), heads, cos, sin)
    torch.testing.assert_close(output.double(), expected.view_as(qkv), atol=1e-5, rtol=1e-5)


@built
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_device_kernels_rotate_if_there_are_any(dtype: torch.dtype) -> None:
    attention = EncoderAttention(24, 3, dtype=dtype)
    qkv, angles = torch.randn(9, 72).to(dtype), torch.randn(9, 1, 4)
    plain = rotated(attention, qkv.clone(), angles.cos(), angles.sin())
    attention.arrange(NativeCpuDevice(torch.device("cpu"), selected_isa()))
    assert attention.rotation is not None
    torch.testing.assert_close(rotated(attention, qkv.clone(), angles.cos(), angles.sin()), plain)
