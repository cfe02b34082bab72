"""`vlmserve eval calibration`."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console
from rich.progress import Progress

from vlmserve.errors import ConfigurationError
from vlmserve.models.hub import resolve_model
from vlmserve.pixie.reliability import TASKS, Calibration, decisions_of, outcomes
from vlmserve.pixie.reliability_plot import WRITERS
from vlmserve.prompt.decisions import write_temperature
from vlmserve.settings.config import EngineConfig, MediaConfig


def run_calibration(engine: EngineConfig, media: MediaConfig, per_task: int, plot: Path | None, *, write: bool) -> None:
    from vlmserve.offline.llm import LLM

    if plot is not None and plot.suffix not in WRITERS:
        raise ConfigurationError(f"--plot {plot}: the name must end in {' or '.join(WRITERS)}")
    folder = resolve_model(engine.model, engine.revision)
    if write and folder.is_file():
        raise ConfigurationError("--write needs a model in a folder; a GGUF file has no place for the temperature")
    llm = LLM(**engine.model_dump(exclude_unset=True), **media.model_dump(exclude_unset=True))
    with llm, Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("Asking", total=per_task * len(TASKS))
        found = outcomes(decisions_of(llm), per_task, lambda: progress.advance(bar))
    calibration = Calibration.of(found)
    typer.echo(calibration.to_markdown())
    if plot is not None:
        plot.write_text(WRITERS[plot.suffix](calibration, engine.model), "utf-8")
        typer.echo(f"Written: {plot}")
    if write:
        try:
            path = write_temperature(folder, calibration.temperature)
        except OSError as error:
            reason = f"{error.filename} cannot be written: {error.strerror}"
            raise ConfigurationError(f"--write: {reason}; copy the model to a folder of yours") from error
        typer.echo(f"Written: {path}")
