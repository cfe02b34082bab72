from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vlmserve.batch.answers import BatchAnswers, LocalAnswers, ServerAnswers
from vlmserve.batch.journal import Result
from vlmserve.batch.rows import Question, Row, read_rows
from vlmserve.batch.run import Progress as BatchProgress
from vlmserve.batch.run import journal_path, run_batch
from vlmserve.cli.answers import status
from vlmserve.cli.messages import note
from vlmserve.errors import ConfigurationError
from vlmserve.settings.config import EngineConfig, MediaConfig
from vlmserve.types import Grammar, SamplingParams


class _Bar(BatchProgress):
    """A progress bar on stderr."""

    def __init__(self) -> None:
        self._rate = TextColumn("{task.fields[rate]}")
        columns = (TextColumn("Answering"), BarColumn(), MofNCompleteColumn(), self._rate)
        self._progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True))
        self._failed = 0

    def begin(self, total: int, done: int) -> None:
        if done:
            note(f"continuing: {done:,} of {total:,} questions are answered already")
        self._task = self._progress.add_task("", total=total, completed=done, rate="")
        self._progress.start()

    def advance(self, result: Result) -> None:
        self._failed += bool(result.error)
        self._progress.advance(self._task)
        speed = self._progress.tasks[0].speed
        rate = "" if speed is None else f"{speed:.1f}/s"
        self._progress.update(self._task, rate=f"{rate} [red]{self._failed} failed" if self._failed else rate)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def run(
    engine: EngineConfig,
    media: MediaConfig,
    source: str,
    prompt: str | None,
    system: str | None,
    output: Path,
    *,
    schema: Path | None,
    url: str | None,
    served_model: str | None,
    concurrency: int,
    params: dict[str, Any],
    retry: bool,
    overwrite: bool,
) -> bool:
    """Answer all rows; False if any failed. Raises ConfigurationError, VLMServeError."""
    rows = read_rows(source)
    question = _question(rows, prompt, system, schema)
    sampling = SamplingParams(**params, grammar=None if schema is None else _grammar(schema))

    def open_answers() -> BatchAnswers:
        if url is not None:
            return ServerAnswers(url, served_model, concurrency)
        with status(f"Loading {engine.model} ..."):
            return LocalAnswers(engine, media)

    with _Bar() as bar:
        summary = run_batch(
            rows, question, sampling, output, open_answers, retry=retry, overwrite=overwrite, progress=bar
        )
    details = [f"{summary.rows - summary.failed:,} of {summary.rows:,} rows have an answer"]
    if summary.repeated:
        details.append(f"{summary.repeated:,} asked what another row asked")
    Console().print(f"{output}: {'; '.join(details)}.", highlight=False, soft_wrap=True)
    if summary.failed:
        note(
            f"{summary.failed:,} row{'s' if summary.failed > 1 else ''} failed; the column error says why. --retry "
            f"asks again. The answers of the others are in {journal_path(output)} until then."
        )
    return not summary.failed


def _question(rows: Sequence[Row], prompt: str | None, system: str | None, schema: Path | None) -> Question | None:
    """The question for all rows; None if rows are requests."""
    if rows[0].request is None:
        if prompt is None:
            raise ConfigurationError("--prompt says what to ask of each row; only a file of requests needs none")
        return Question(prompt, system)
    if (prompt, system, schema) != (None, None, None):
        raise ConfigurationError("the rows are whole requests; leave out --prompt, --system and --schema")
    return None


def _grammar(path: Path) -> Grammar:
    try:
        return Grammar.json(msgspec.json.decode(path.read_bytes().removeprefix(codecs.BOM_UTF8), type=dict[str, Any]))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--schema {path}: {error}; the file must hold a JSON schema") from None
