"""Stages of the GPU benchmark by the data flow of a GPU: see `tests.static_device`."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks import gpu_decode, gpu_images, gpu_stages
from tests.static_device import StaticDevice, static_devices  # noqa: F401

CPU = torch.device("cpu")


def test_decodes_are_captured_and_submitted_ahead(tmp_path: Path, static_devices: list[StaticDevice]) -> None:  # noqa: F811
    report = dict(gpu_decode.decode(CPU, gpu_stages.TINY, tmp_path))
    assert all(figures["tokens_s_one_ahead"] > 0 for figures in report.values())
    assert all(device.num_ahead > 0 for device in static_devices)


def test_images_arrive_at_their_places(tmp_path: Path) -> None:
    assert len(dict(gpu_images.images(CPU, gpu_stages.TINY, tmp_path))) == 5
