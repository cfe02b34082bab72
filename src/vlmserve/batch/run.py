"""Answers all rows of a batch, each question once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from vlmserve.batch.answers import Ask, BatchAnswers, Chat
from vlmserve.batch.journal import Journal, Result
from vlmserve.batch.results import check_output, write_results
from vlmserve.batch.rows import Question, Row, digest
from vlmserve.errors import ConfigurationError, InvalidImageError
from vlmserve.types import SamplingParams

READERS = 4
"""Threads that read images to compute the digests of questions."""


@dataclass(frozen=True)
class Summary:
    rows: int
    asked: int
    """Questions that this run answered."""
    resumed: int
    """Rows that an earlier run answered."""
    repeated: int
    """Rows with the same question as another row."""
    failed: int
    """Rows without an answer."""


class Progress:
    """Ignores the progress of a batch; override its methods."""

    def begin(self, total: int, done: int) -> None:
        """done: questions that an earlier run answered."""

    def advance(self, result: Result) -> None:
        """One more question has its answer."""


def journal_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.progress")


def run_batch(
    rows: Sequence[Row],
    question: Question | None,
    params: SamplingParams,
    output: Path,
    open_answers: Callable[[], BatchAnswers],
    *,
    retry: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Ask each row's question; write `output` when all answers are there.

    question, params: for rows without a request; question is None if all have one.

    An interrupted run continues from `journal_path`. Failed rows keep it, for a run with `retry`. Equal questions are
    asked once, unless answers are random. Raises ConfigurationError for invalid input, VLMServeError if answers stop
    coming.
    """
    progress = progress or Progress()
    check_output(output, rows)
    if question is not None:
        question.check(rows)
    path = journal_path(output)
    if output.exists() and not overwrite and not (retry and path.exists()):
        reason = "no row in it has failed" if retry else "give --overwrite to replace it"
        raise ConfigurationError(f"{output} exists already; {reason}")
    output.parent.mkdir(parents=True, exist_ok=True)
    answers = open_answers()
    with Journal(path) as journal:
        asked = _questions(rows, question, params, answers.name)
        failures = {key: result for key, result in asked if result is not None}
        wanted = {key: row for row, (key, result) in zip(rows, asked, strict=True) if result is None}
        done = {key for key in wanted if key in journal.results and not (retry and journal.results[key].error)}
        missing = [key for key in wanted if key not in done]
        progress.begin(len(wanted), len(done))
        for number, result in answers.answer([_ask(wanted[key], question, params) for key in missing]):
            journal.add(missing[number], result)
            progress.advance(result)
        results = [failures[key] if key in failures else journal.results[key] for key, _ in asked]
        write_results(output, rows, results, parsed=params.grammar is not None)
        failed = sum(bool(result.error) for result in results)
        if not failed:
            journal.remove()
    resumed = sum(key in done for key, _ in asked)
    return Summary(len(rows), len(missing), resumed, len(rows) - len(wanted) - len(failures), failed)


def _ask(row: Row, question: Question | None, params: SamplingParams) -> Ask:
    if row.request is not None:
        return row.request
    assert question is not None
    return Chat(question.messages(row), params)


def _draws(row: Row, params: SamplingParams) -> bool:
    """Return whether equal questions may get different answers."""
    if row.request is not None:
        return row.request.body.get("temperature") != 0 and row.request.body.get("seed") is None
    return params.temperature > 0 and params.seed is None


def _settings(row: Row, model: str, params: SamplingParams) -> bytes:
    if row.request is not None:
        return msgspec.json.encode([model])
    grammar = None if params.grammar is None else params.grammar.text
    return msgspec.json.encode([model, params.temperature, params.max_tokens, params.seed, grammar])


def _questions(
    rows: Sequence[Row], question: Question | None, params: SamplingParams, model: str
) -> Sequence[tuple[bytes, Result | None]]:
    """Key of each row's question, and an error if it cannot be asked."""

    def read(numbered: tuple[int, Row]) -> tuple[bytes, Result | None]:
        number, row = numbered
        settings = _settings(row, model, params) + (row.id.encode() if _draws(row, params) else b"")
        try:
            messages = [] if question is None else question.messages(row)
            return digest(row, messages, settings), None
        except InvalidImageError as error:
            return b"row %d" % number, Result(error=str(error))
        except OSError as error:
            return b"row %d" % number, Result(error=f"{error.filename}: {error.strerror}")

    numbered: Iterable[tuple[int, Row]] = enumerate(rows)
    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(read, numbered))
