"""Quantizing a checkpoint by any method."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from vlmserve.calibration.prompts import calibration_prompts
from vlmserve.calibration.run import Calibration
from vlmserve.calibration.settings import QuantizeConfig
from vlmserve.config import MediaConfig, read_settings
from vlmserve.errors import ConfigurationError
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.models.estimate import MemoryEstimate
from vlmserve.models.quantized import Saving, save_quantized


def quantize_checkpoint(
    folder: Path, out: Path, how: QuantizeConfig, kernels: str, progress: Callable[[int, int], None]
) -> tuple[Saving, list[str]]:
    """Write a quantized copy of a checkpoint. Returns what it saves, and what went wrong, for people.

    folder, out: see `Calibration`. progress: is told the parts done and how many there are. Raises what `Calibration`,
    `calibration_prompts` and `save_quantized` raise.
    """
    _check_disk(folder, out, how, kernels)
    if how.method == "rtn":
        return save_quantized(folder, out, how.quantization, progress), []
    preparer = RequestPreparer(folder, read_settings(MediaConfig, {}))
    prompts = calibration_prompts(how.calibration, preparer, how.calibration_tokens)
    run = Calibration(folder, out, how.quantization, prompts, image_weight=how.image_weight, kernels=kernels)
    result = run.run(progress)
    return result.saving, result.notes


def _check_disk(folder: Path, out: Path, how: QuantizeConfig, kernels: str) -> None:
    """Raises ConfigurationError for a disk with less room than the weights take, and what `MemoryEstimate` raises."""
    needed = MemoryEstimate(folder, torch.device("cpu"), kernels).weights(how.quantization)
    there = sum(path.stat().st_size for path in out.glob("*")) if out.is_dir() else 0
    place = next(one for one in (out.absolute(), *out.absolute().parents) if one.exists())
    free = shutil.disk_usage(place).free
    if free < needed - there:
        raise ConfigurationError(
            f"the disk with {place} has {free / 1e6:.0f} MB free, and the weights need {(needed - there) / 1e6:.0f} MB"
        )
