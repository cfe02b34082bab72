"""A batch that tests interrupt."""

from __future__ import annotations

from pathlib import Path

from tests.batch.answering import Shouting
from vlmserve.batch.rows import Question, read_rows
from vlmserve.batch.run import run_batch
from vlmserve.types import SamplingParams


def run(source: Path, output: Path) -> None:
    """Answer the rows of `source` into `output`, and say when that begins."""
    rows = read_rows(str(source))
    print("begins", flush=True)
    run_batch(rows, Question("say {word}"), SamplingParams(temperature=0), output, lambda: Shouting(delay=0.002))
