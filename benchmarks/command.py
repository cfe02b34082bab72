"""What the benchmarks' command lines have in common: the model, where it runs, and where the numbers go."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vlmserve.models.hub import resolve_model


def model_parser(
    name: str, description: str | None, default_model: str, *, dtype: str = "auto", kv_cache_memory: str = "4GiB"
) -> argparse.ArgumentParser:
    """A parser for a benchmark of a model; its description is the first paragraph of the given one."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=(description or "").split("\n\n")[0])
    parser.add_argument("--model", help=f"name, folder or id; default: {default_model}")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default=dtype)
    parser.add_argument("--kv-cache-memory", default=kv_cache_memory)
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    return parser


def span(text: str) -> tuple[int, int]:
    """Two lengths as they are written on a command line: ``8-64``, or ``64`` for both."""
    low, _, high = text.partition("-")
    return int(low), int(high or low)


@contextmanager
def checkpoint(options: argparse.Namespace, make: Callable[[Path], Path]) -> Iterator[Path]:
    """The folder of the model that is asked for, or of one that `make` puts into a temporary folder."""
    if options.model:
        yield resolve_model(options.model)
        return
    with tempfile.TemporaryDirectory(prefix="vlmserve-benchmark-") as place:
        yield make(Path(place))


def run(
    options: argparse.Namespace,
    make: Callable[[Path], Path],
    measure: Callable[[argparse.Namespace, Path, Console], dict[str, Any]],
    show: Callable[[dict[str, Any], Console], None],
) -> None:
    """Measure the model that is asked for, or the one that `make` makes; show the report and keep it."""
    console = Console()
    with checkpoint(options, make) as folder:
        report = measure(options, folder, console)
    show(report, console)
    keep(report, options)


def show_rows(report: dict[str, Any]) -> None:
    """Print the columns and rows of a result."""
    table = Table(*report["columns"])
    for row in report["rows"]:
        table.add_row(*map(str, row))
    Console().print(table)


def keep(report: dict[str, Any], options: argparse.Namespace) -> None:
    """Write the numbers where they were asked for."""
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n")
