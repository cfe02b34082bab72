"""A batch that tests interrupt: ``python -m tests.batch.interrupted INPUT OUTPUT``."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.batch.answering import Shouting
from vlmserve.batch.rows import Question, read_rows
from vlmserve.batch.run import run_batch
from vlmserve.types import SamplingParams

if __name__ == "__main__":
    rows = read_rows(sys.argv[1])
    print("begins", flush=True)
    run_batch(
        rows, Question("say {word}"), SamplingParams(temperature=0), Path(sys.argv[2]), lambda: Shouting(delay=0.002)
    )
