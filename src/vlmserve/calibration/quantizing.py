"""Quantize a checkpoint with any method."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from vlmserve.calibration.mixed import choose_bits
from vlmserve.calibration.prompts import calibration_prompts
from vlmserve.calibration.run import Calibration
from vlmserve.errors import ConfigurationError
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.models.estimate import MemoryEstimate
from vlmserve.models.quantized import Saving, save_quantized
from vlmserve.settings.base import read_settings
from vlmserve.settings.config import MediaConfig
from vlmserve.settings.quantization import QuantizationConfig


def quantize_checkpoint(
    folder: Path, out: Path, config: QuantizationConfig, kernels: str, progress: Callable[[int, int], None]
) -> tuple[Saving, list[str]]:
    """Return the saving, and notes about problems.

    Arguments and errors are as in `Calibration`, `calibration_prompts` and `save_quantized`.
    """
    _check_disk(folder, out, config, kernels)
    notes: list[str] = []
    if not config.calibrates:
        return save_quantized(folder, out, config, progress), notes
    preparer = RequestPreparer(folder, read_settings(MediaConfig, {}))
    prompts = calibration_prompts(config.calibration, preparer, config.calibration_tokens, config.image_weight)
    own = progress
    if config.weight_memory is not None:
        config = choose_bits(folder, out, config, prompts, kernels, lambda done, total: progress(done, 2 * total))
        counts = Counter(config.overrides.values())
        notes.append(
            f"{counts['int4']} layers have 4-bit weights, {counts['int8']} 8-bit, {counts['none']} unquantized"
        )

        def own(done: int, total: int) -> None:
            progress(total + done, 2 * total)

    if config.method == "rtn":
        return save_quantized(folder, out, config, own), notes
    run = Calibration(folder, out, config, prompts, kernels=kernels)
    result = run.run(own)
    return result.saving, notes + result.notes


def _check_disk(folder: Path, out: Path, config: QuantizationConfig, kernels: str) -> None:
    """Raises ConfigurationError if the disk lacks space, and as `MemoryEstimate` does."""
    needed = MemoryEstimate(folder, torch.device("cpu"), kernels).weights(config)
    needed = needed if config.weight_memory is None else min(needed, config.weight_memory)
    there = sum(path.stat().st_size for path in out.glob("*")) if out.is_dir() else 0
    place = next(one for one in (out.absolute(), *out.absolute().parents) if one.exists())
    free = shutil.disk_usage(place).free
    if free < needed - there:
        raise ConfigurationError(
            f"the disk with {place} has {free / 1e6:.0f} MB free, and the weights need {(needed - there) / 1e6:.0f} MB"
        )
