from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from vlmserve.calibration.quantizing import quantize_checkpoint
from vlmserve.cli.tables import add_bar
from vlmserve.engine.loading import set_threads
from vlmserve.models.hub import resolve_model
from vlmserve.settings.config import EngineConfig
from vlmserve.settings.quantization import QuantizationConfig

NOTES_SHOWN = 8


def run_quantize(engine: EngineConfig, how: QuantizationConfig, out: Path) -> None:
    folder = resolve_model(engine.model, engine.revision, engine.mmproj)
    set_threads(engine.num_threads)
    started = time.perf_counter()
    console = Console(stderr=True)
    with Progress(console=console) as progress:
        saving, notes = quantize_checkpoint(folder, out, how, engine.kernels, add_bar(progress, "Quantizing"))
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
