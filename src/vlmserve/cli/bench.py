"""The figures of a benchmark on a terminal and in a file."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from vlmserve.bench import Report, bench
from vlmserve.config import EngineConfig
from vlmserve.models.hub import resolve_model

UNITS = {"prefill": "tokens/s", "decode": "tokens/s", "vision": "pictures/s"}


def run_bench(config: EngineConfig, schemes: tuple[str, ...], at_once: tuple[int, ...], path: Path | None) -> None:
    """Measure, show a table, and write the figures to `path` as JSON if there is one."""
    console = Console()
    folder = resolve_model(config.model, config.revision)
    with Console(stderr=True).status("") as status:
        report = bench(config, folder, schemes=schemes, at_once=at_once, progress=status.update)
    show(report, console)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


def show(report: Report, console: Console) -> None:
    """Print the figures, with their shares of what the machine can do."""
    limits = report.limits
    console.print(
        f"[bold]{report.model}[/]: {report.num_parameters / 1e6:.1f} M parameters, {report.dtype}, {report.device}, "
        f"{report.threads} threads, torch {report.torch}. This machine reads {limits.bytes_per_s / 1e9:.0f} GB/s and "
        f"multiplies at {limits.flops_per_s / 1e9:.0f} GFLOP/s.",
        highlight=False,
    )
    table = Table("weights", "what", "concurrency", "rate", "ms", "bandwidth", "FLOP/s")
    for figure in report.figures:
        table.add_row(
            "plain" if figure.weights == "none" else figure.weights,
            figure.what,
            str(figure.at_once),
            f"{figure.rate:.1f} {UNITS[figure.what]}",
            f"{figure.milliseconds:.1f}",
            f"{figure.of_bandwidth:.0%}",
            f"{figure.of_flops:.0%}",
        )
    console.print(table)
