from __future__ import annotations

import shutil
import sys

from rich.console import Console

from vlmserve.cli.tables import show_table
from vlmserve.families.family import BYTES
from vlmserve.memory import free_memory
from vlmserve.models import catalogue
from vlmserve.models.downloads import downloads
from vlmserve.models.hub import built_in_folder
from vlmserve.models.names import MODELS
from vlmserve.settings.config import BUILT_IN_MODEL


def show_models(*, as_markdown: bool, families: bool) -> None:
    if as_markdown:
        print(catalogue.markdown(), end="")
        return
    if families:
        show_table(catalogue.FAMILY_HEADINGS, catalogue.family_rows())
        _say(
            "Give serve, ask or chat a local folder or a Hugging Face id with one of these architectures in its "
            "config.json, or a .gguf file."
        )
        return
    free = _free_memory()
    there = {download.repository for download in downloads()}
    sizes = tuple(f"{weights}, GB" for weights in BYTES)
    built_in = sum(path.stat().st_size for path in built_in_folder().glob("*.safetensors"))
    rows = [(BUILT_IN_MODEL, f"{built_in / 1e9:.1f}", *[""] * (len(BYTES) - 1), "in bfloat16", "built in")]
    rows += [
        (
            model.name,
            *(f"{model.memory(weights) / 1e9:.1f}" for weights in BYTES),
            next((f"in {weights}" for weights in BYTES if model.fits(free, weights)), "no"),
            "yes" if model.repository in there else "no",
        )
        for model in MODELS
    ]
    show_table(("Name", *sizes, "Fits here", "Downloaded"), rows, right=sizes)
    _say(
        f"GB are weights. A model fits if its weights and a KV cache fit in {free / 1e9:.1f} GB of free memory. "
        "vlmserve models --families lists the supported architectures."
    )


def _free_memory() -> int:
    if shutil.which("nvidia-smi") is None and sys.platform != "darwin":
        return free_memory()  # without torch, whose import takes seconds
    from vlmserve.devices.choice import find_device, free_device_memory

    return free_device_memory(find_device("auto")) or free_memory()


def _say(text: str) -> None:
    Console(stderr=True, highlight=False).print(text, style="dim")
