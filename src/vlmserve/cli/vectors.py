"""`vlmserve embed` on a terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vlmserve.batch.rows import Question, read_rows
from vlmserve.batch.vectors import check_vectors, embed_rows, write_vectors
from vlmserve.cli.answers import open_llm
from vlmserve.cli.messages import note
from vlmserve.errors import ConfigurationError
from vlmserve.settings.config import EngineConfig, MediaConfig


def run(
    engine: EngineConfig,
    media: MediaConfig,
    source: str,
    prompt: str,
    system: str | None,
    output: Path,
    *,
    dimensions: int | None,
    overwrite: bool,
) -> bool:
    """Embed all rows; False if any failed. Raises ConfigurationError, VLMServeError."""
    if output.exists() and not overwrite:
        raise ConfigurationError(f"{output} exists; --overwrite replaces it")
    rows, question = read_rows(source), Question(prompt, system)
    check_vectors(output, rows, question)
    llm = open_llm(engine, media)
    columns = (TextColumn("Embedding"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with llm, Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(rows))
        vectors = embed_rows(llm, rows, question, dimensions, lambda: progress.advance(task))
    write_vectors(output, rows, vectors)
    failed = sum(vector.data is None for vector in vectors)
    Console().print(f"{output}: {len(rows) - failed:,} of {len(rows):,} rows have a vector.", highlight=False)
    if failed:
        note(f"{failed:,} row{'s' if failed > 1 else ''} failed; the column error says why")
    return not failed
