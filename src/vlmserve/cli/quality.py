from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from vlmserve.calibration.plot import Point, quality_plot
from vlmserve.calibration.quality import Comparison, Quality, quality_samples
from vlmserve.calibration.questions import read_questions, share_right
from vlmserve.cli.tables import add_bar
from vlmserve.engine.loading import load
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.loadtest.dataset import Entry
from vlmserve.models.hub import resolve_model
from vlmserve.models.identity import stored_bytes
from vlmserve.offline.llm import LLM
from vlmserve.pixie.evaluation import evaluate, greedy_answers
from vlmserve.settings.base import read_settings
from vlmserve.settings.config import EngineConfig, MediaConfig
from vlmserve.tools.bench import bench

PROMPT = 1000
"""Prompt tokens of the speed measurement."""
STEPS = 64
"""Answer tokens of the speed measurement."""


class Row(msgspec.Struct, frozen=True):
    model: str
    megabytes: float
    """Of its tensors in files."""
    quality: Quality | None
    core: float | None
    """Accuracy in pixie's core tasks, 0 to 1."""
    further: float | None
    """Accuracy in pixie's extra tasks, 0 to 1."""
    right: float | None
    """Accuracy on the questions of a file, 0 to 1."""
    prompt_rate: float | None
    """Tokens/s of a prompt of `PROMPT` tokens."""
    answer_rate: float | None
    """Tokens/s of one answer."""


def run_quality(
    config: EngineConfig,
    models: Sequence[str],
    against: str,
    num_tokens: int,
    *,
    conversations: Path | None,
    per_task: int,
    questions: Path | None,
    turns: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Print a table or JSON. turns: speed measurements per model."""
    asked = [] if questions is None else read_questions(questions)
    folder = resolve_model(against, config.revision)
    rows = []
    with Progress(console=Console(stderr=True)) as progress:
        preparer = RequestPreparer(folder, read_settings(MediaConfig, {}))
        samples = quality_samples(preparer, num_tokens, conversations)
        bar = add_bar(progress, Path(against).name)
        reference = load(config.model_copy(update={"model": against}), folder)
        comparison = Comparison(reference, samples, bar)
        qualities: list[Quality | None] = [None]
        for name in models:
            bar = add_bar(progress, Path(name).name)
            model = load(config.model_copy(update={"model": name}))
            qualities.append(comparison.of(model, bar))
            del model
            gc.collect()
        del comparison, reference
        speeds = _speeds(config, [against, *models], turns, progress)
        for name, quality, speed in zip([against, *models], qualities, speeds, strict=True):
            scores = _scores(config, name, per_task, asked, progress)
            rows.append(Row(name, stored_bytes(resolve_model(name, config.revision)) / 1e6, quality, *scores, *speed))
    if plot is not None:
        plot.write_text(_plot(rows), "utf-8")
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(rows)).decode())
    else:
        _print(rows)


def _speeds(
    config: EngineConfig, names: Sequence[str], turns: int, progress: Progress
) -> list[tuple[float, float] | tuple[None, None]]:
    """Median prompt and answer tokens/s of each model, interleaved: other load affects all."""
    if not turns:
        return [(None, None)] * len(names)
    bar = progress.add_task("Speed", total=turns * len(names))
    rates: list[list[tuple[float, float]]] = [[] for _ in names]
    for _ in range(turns):
        for name, own in zip(names, rates, strict=True):
            settings = config.model_copy(update={"model": name})
            folder = resolve_model(name, config.revision)
            report = bench(settings, folder, schemes=("none",), at_once=(1,), long_prompt_len=PROMPT, steps=STEPS)
            found = {figure.what: figure.rate for figure in report.figures}
            own.append((found["prefill"], found["decode"]))
            gc.collect()
            progress.advance(bar)
    return [(median(one[0] for one in own), median(one[1] for one in own)) for own in rates]


def _plot(rows: Sequence[Row]) -> str:
    points = [
        Point(Path(row.model).name, row.megabytes, row.quality.divergence if row.quality else 0.0, row.answer_rate)
        for row in rows
    ]
    return quality_plot(points, f"KL divergence from {points[0].name}, nats a token; lower is better")


def _scores(
    config: EngineConfig, name: str, per_task: int, asked: Sequence[Entry], progress: Progress
) -> tuple[float | None, float | None, float | None]:
    """`Row.core`, `Row.further` and `Row.right` of a model."""
    if not per_task and not asked:
        return None, None, None
    llm = LLM(**{**config.model_dump(exclude_unset=True), "model": name})
    core = further = right = None
    if per_task:
        bar = add_bar(progress, f"{Path(name).name}: tasks")
        report = evaluate(greedy_answers(llm), per_task=per_task, progress=bar)
        core, further = report.mean("core"), report.mean("further")
    if asked:
        right = share_right(llm, asked, add_bar(progress, f"{Path(name).name}: questions"))
    return core, further, right


def _print(rows: Sequence[Row]) -> None:
    tasks = ("core", "further") if rows[0].core is not None else ()
    questions = ("right",) if rows[0].right is not None else ()
    speeds = ("prompt/s", "answer/s") if rows[0].answer_rate is not None else ()
    table = Table("model", "MB", "perplexity", "change", "KL", "same token", *tasks, *questions, *speeds)
    measured = next(row.quality for row in rows if row.quality is not None)
    for row in rows:
        quality = row.quality
        loss = measured.reference_loss if quality is None else quality.loss
        cells = [row.model, f"{row.megabytes:.1f}", f"{msgspec.structs.replace(measured, loss=loss).perplexity:.4f}"]
        if quality is None:
            cells += ["", "", ""]
        else:
            ratio = quality.perplexity / quality.reference_perplexity
            error = None if quality.change_error is None else ratio * quality.change_error
            cells += [
                _with_error(f"{ratio - 1:+.3%}", error, ".3%"),
                _with_error(f"{quality.divergence:.5f}", quality.divergence_error, ".5f"),
                f"{quality.agreement:.2%}",
            ]
        cells += [f"{score:.1%}" for score in (row.core, row.further, row.right) if score is not None]
        cells += [f"{rate:,.0f}" for rate in (row.prompt_rate, row.answer_rate) if rate is not None]
        table.add_row(*cells)
    console = Console()
    console.print(
        f"{measured.num_tokens} tokens counted; KL in nats a token, against {rows[0].model}; ± one standard error",
        highlight=False,
    )
    console.print(table)


def _with_error(figure: str, error: float | None, form: str) -> str:
    return figure if error is None else f"{figure} ± {error:{form}}"
