"""`vlmserve cache`: packed weights on disk, on a terminal."""

from __future__ import annotations

import time

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vlmserve.config import EngineConfig
from vlmserve.errors import ConfigurationError
from vlmserve.models.weights_cache import WeightsCache


def show_cache(engine: EngineConfig, *, clear: bool) -> None:
    """Print the files of packed weights, or remove them all."""
    cache = WeightsCache.at(engine.weights_cache, engine.weights_cache_size)
    console = Console(highlight=False)
    if clear:
        try:
            removed = cache.clear()
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigurationError(
                f"cannot remove {error.filename or cache.folder}: {reason}; make the folder writable"
            ) from error
        console.print(f"{removed / 1e6:,.1f} MB removed from {cache.folder}", soft_wrap=True)
        return
    files = cache.files()
    total = sum(file.num_bytes for file in files)
    console.print(
        f"{total / 1e6:,.1f} MB of packed weights in {cache.folder} (limit {cache.limit / 1e6:,.1f} MB)", soft_wrap=True
    )
    if files:
        table = Table("model", "MB", "last used", "file", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.columns[1].justify = "right"
        for file in files:
            used = time.strftime("%Y-%m-%d %H:%M", time.localtime(file.used))
            table.add_row(file.model, f"{file.num_bytes / 1e6:,.1f}", used, file.path.name)
        console.print(table)
        console.print("vlmserve cache --clear removes them all.")
