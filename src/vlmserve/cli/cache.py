from __future__ import annotations

import time

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vlmserve.cache.tiers import Entries
from vlmserve.engine.draft_costs import COSTS
from vlmserve.errors import ConfigurationError
from vlmserve.models.weights_cache import WeightsCache
from vlmserve.settings.config import EngineConfig


def show_cache(engine: EngineConfig) -> None:
    cache = WeightsCache.at(engine.weights_cache, engine.weights_cache_size)
    console = Console(highlight=False)
    files = cache.files()
    total = sum(file.num_bytes for file in files)
    console.print(f"{_mb(total)} of packed weights in {cache.folder} (limit {_mb(cache.limit)})", soft_wrap=True)
    if files:
        table = Table("model", "MB", "last used", "file", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.columns[1].justify = "right"
        for file in files:
            table.add_row(file.model, f"{file.num_bytes / 1e6:,.1f}", _date(file.used), file.path.name)
        console.print(table)
    if not engine.disk_cache:
        console.print("no disk cache; --disk-cache DIR names its folder")
    else:
        entries = Entries.at(engine.disk_cache, engine.disk_cache_memory)
        found = entries.all()
        size = f"{_mb(sum(entry.num_bytes for entry in found))} in {len(found):,} entries"
        console.print(f"{size} of the disk cache in {entries.folder} (limit {_mb(entries.limit)})", soft_wrap=True)
        if found:
            console.print(f"last used from {_date(found[-1].used)} to {_date(found[0].used)}")
    known = len(COSTS.facts)
    console.print(f"draft costs of {known} model{'s' * (known != 1)} in {COSTS.file}", soft_wrap=True)
    console.print("vlmserve cache clear removes them all.")


def clear_cache(engine: EngineConfig) -> None:
    """Raises ConfigurationError on failure."""
    caches: list[WeightsCache | Entries] = [WeightsCache.at(engine.weights_cache, engine.weights_cache_size)]
    if engine.disk_cache:
        caches.append(Entries.at(engine.disk_cache, engine.disk_cache_memory))
    for place, clear in [*((cache.folder, cache.clear) for cache in caches), (COSTS.file, COSTS.clear)]:
        try:
            removed = clear()
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigurationError(
                f"cannot remove {error.filename or place}: {reason}; make the folder writable"
            ) from error
        Console(highlight=False).print(f"{_mb(removed)} removed from {place}", soft_wrap=True)


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
