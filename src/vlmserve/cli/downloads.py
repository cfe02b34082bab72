"""`vlmserve pull`, `list` and `rm` on a terminal."""

from __future__ import annotations

import sys
import time

import typer
from rich.console import Console

from vlmserve.cli.tables import show_table
from vlmserve.errors import ConfigurationError
from vlmserve.models.downloads import Download, downloads, remove
from vlmserve.models.hub import resolve_model


def run_pull(model: str, revision: str | None) -> None:
    place = resolve_model(model, revision)
    size = sum(path.stat().st_size for path in (place.rglob("*") if place.is_dir() else [place]) if path.is_file())
    Console().print(f"{model}: {_gigabytes(size)} GB in {place}", highlight=False, soft_wrap=True)
    Console(stderr=True).print(f"Try it: vlmserve run {model}", style="dim", highlight=False, soft_wrap=True)


def show_downloads() -> None:
    rows = [
        (one.name, _gigabytes(one.num_bytes), time.strftime("%Y-%m-%d %H:%M", time.localtime(one.used)))
        for one in downloads()
    ]
    show_table(("Name", "GB", "Last used"), rows, right=("GB",))
    if not rows:
        Console(stderr=True).print("No model is downloaded. Get one: vlmserve pull NAME", highlight=False)


def run_rm(models: list[str], *, sure: bool) -> None:
    """Remove models. Without `sure`, ask on a terminal."""

    def confirm(download: Download) -> bool:
        if not sys.stdin.isatty():
            raise ConfigurationError("give --yes to remove a model without a question")
        return typer.confirm(f"Remove {download.name} ({_gigabytes(download.num_bytes)} GB)?")

    for model in models:
        removed = remove(model, (lambda download: True) if sure else confirm)
        text = f"{model} stays" if removed is None else f"{model}: {_gigabytes(removed.num_bytes)} GB removed"
        Console().print(text, highlight=False, soft_wrap=True)


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f}"
