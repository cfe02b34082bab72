"""Quantizing a checkpoint on a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from vlmserve.calibration.prompts import calibration_prompts
from vlmserve.calibration.run import Calibration
from vlmserve.calibration.settings import QuantizeConfig
from vlmserve.config import EngineConfig, MediaConfig, read_settings
from vlmserve.engine.loading import set_threads
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.models.hub import resolve_model
from vlmserve.models.quantized import Saving, save_quantized

NOTES_SHOWN = 8


def run_quantize(engine: EngineConfig, how: QuantizeConfig, out: Path) -> None:
    """Write the quantized checkpoint, with a progress bar, and say what it saves and what went wrong."""
    folder = resolve_model(engine.model, engine.revision)
    set_threads(engine.num_threads)
    started = time.perf_counter()
    console = Console(stderr=True)
    with Progress(console=console) as progress:
        bar = progress.add_task("Quantizing", total=None)

        def show(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)

        saving, notes = _quantize(folder, engine, how, out, show)
    for note in notes[:NOTES_SHOWN]:
        console.print(note, highlight=False, soft_wrap=True)
    if len(notes) > NOTES_SHOWN:
        console.print(f"and {len(notes) - NOTES_SHOWN} more notes", highlight=False)
    Console().print(
        f"{saving.before / 1e6:.1f} MB of weights became {saving.after / 1e6:.1f} MB in "
        f"{time.perf_counter() - started:.1f} s. Try it: vlmserve serve {out}",
        highlight=False,
        soft_wrap=True,
    )


def _quantize(
    folder: Path, engine: EngineConfig, how: QuantizeConfig, out: Path, show: Callable[[int, int], None]
) -> tuple[Saving, list[str]]:
    if how.method == "rtn":
        return save_quantized(folder, out, how.quantization, show), []
    preparer = RequestPreparer(folder, read_settings(MediaConfig, {}))
    prompts = calibration_prompts(how.calibration, preparer, how.calibration_tokens)
    run = Calibration(folder, out, how.quantization, prompts, image_weight=how.image_weight, kernels=engine.kernels)
    result = run.run(show)
    return result.saving, result.notes
