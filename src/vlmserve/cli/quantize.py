"""Quantizing a checkpoint on a terminal."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from vlmserve.config import EngineConfig
from vlmserve.models.hub import resolve_model
from vlmserve.models.quantized import save_quantized


def run_quantize(config: EngineConfig, out: Path) -> None:
    """Write the quantized checkpoint, with a progress bar, and say what it saves."""
    folder = resolve_model(config.model, config.revision)
    started = time.perf_counter()
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("Quantizing")
        saving = save_quantized(
            folder, out, config.quantization, lambda done, total: progress.update(bar, completed=done, total=total)
        )
    Console().print(
        f"{saving.before / 1e6:.1f} MB of weights became {saving.after / 1e6:.1f} MB in "
        f"{time.perf_counter() - started:.1f} s. Try it: vlmserve serve {out}",
        highlight=False,
        soft_wrap=True,
    )
