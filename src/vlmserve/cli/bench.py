from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from vlmserve.engine import check_settings
from vlmserve.errors import ModelLoadError
from vlmserve.models.hub import resolve_model
from vlmserve.settings.config import EngineConfig

if TYPE_CHECKING:
    from vlmserve.tools.bench import Figure, Report


def run_bench(
    config: EngineConfig,
    schemes: tuple[str, ...],
    at_once: tuple[int, ...],
    path: Path | None,
    *,
    every: bool,
    compare: bool,
) -> None:
    """Measure, print a table, and write JSON to `path`.

    every: all instruction sets. compare: also torch. Raises like `check_settings`.
    """
    console = Console()
    folder = resolve_model(config.model, config.revision, config.mmproj)
    for scheme in schemes:
        try:
            check_settings(config.model_copy(update={"quantize": scheme}), folder)
        except ModelLoadError as error:
            raise ModelLoadError(str(error).replace("--quantize", "--scheme")) from error
    from vlmserve.kernels.extension import supported_isas
    from vlmserve.tools.bench import bench

    chosen = supported_isas() if every else (config.kernels,)
    kernels = (*chosen, "torch") if compare and "torch" not in chosen else chosen
    with Console(stderr=True).status("") as status:
        report = bench(config, folder, schemes=schemes, kernels=kernels, at_once=at_once, progress=status.update)
    show(report, console)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


def show(report: Report, console: Console) -> None:
    limits = report.limits
    console.print(
        f"[bold]{report.model}[/]: {report.num_parameters / 1e6:.1f} M parameters, {report.dtype}, {report.device}, "
        f"{report.threads} threads, torch {report.torch}. This machine reads {limits.bytes_per_s / 1e9:.0f} GB/s and "
        f"multiplies at {limits.flops_per_s / 1e9:.0f} GFLOP/s.",
        highlight=False,
    )
    by_torch = {_kind(figure): figure.rate for figure in report.figures if figure.kernels == "torch"}
    caption = "rate: tokens/s, of vision images/s; memory, FLOP/s: share of what the machine can do"
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0), caption=caption)
    for name in ("weights", "kernels", "what", "at", "rate", "ms", "memory", "FLOP/s", "x torch"):
        table.add_column(name, no_wrap=True, justify="left" if name in ("weights", "kernels", "what") else "right")
    for figure in report.figures:
        theirs = by_torch.get(_kind(figure))
        table.add_row(
            "plain" if figure.weights == "none" else figure.weights,
            figure.kernels,
            figure.what,
            str(figure.at_once),
            f"{figure.rate:.1f}",
            f"{figure.milliseconds:.1f}",
            f"{figure.of_bandwidth:.0%}",
            f"{figure.of_flops:.0%}",
            "" if theirs is None or figure.kernels == "torch" else f"{figure.rate / theirs:.2f}",
        )
    console.print(table)


def _kind(figure: Figure) -> tuple[str, str, int]:
    return figure.weights, figure.what, figure.at_once
