"""What a batch's journal costs: `vlmserve batch` beside `LLM.chat` on the same rows.

    .venv/bin/python -m benchmarks.batch --rows 400

Both take turns in one process with one loaded model. Every turn draws other images, so that nothing is cached.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image
from rich.console import Console

from vlmserve.batch.answers import LocalAnswers
from vlmserve.batch.rows import Question, Row, read_rows
from vlmserve.batch.run import run_batch
from vlmserve.config import EngineConfig, MediaConfig
from vlmserve.types import SamplingParams

QUESTION = Question("How many shapes are there?")


def save_images(folder: Path, count: int, seed: int) -> list[Row]:
    """A folder of that many images of noise, as rows."""
    folder.mkdir()
    draw = np.random.default_rng(seed)
    for number in range(count):
        pixels = draw.integers(0, 256, (64, 64, 3), np.uint8)
        Image.fromarray(pixels).resize((256, 256)).save(folder / f"{number:05}.jpg")
    return read_rows(str(folder))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pixie")
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    answers = LocalAnswers(EngineConfig(model=options.model), MediaConfig())
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens, ignore_eos=True)
    rates: dict[str, list[float]] = {"LLM.chat": [], "batch": []}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats + 1):
            for way in sorted(rates, reverse=repeat % 2 == 1):
                rows = save_images(Path(folder, f"{repeat} {way}"), options.rows, hash((repeat, way)) % 2**32)
                begin = time.perf_counter()
                if way == "batch":
                    run_batch(rows, QUESTION, params, Path(folder, f"{repeat}.jsonl"), lambda: answers)
                else:
                    answers.llm.chat([QUESTION.messages(row) for row in rows], params, use_tqdm=False)
                if repeat:  # the first turn warms up
                    rates[way].append(len(rows) / (time.perf_counter() - begin))
    ratio = statistics.median(one / other for one, other in zip(rates["batch"], rates["LLM.chat"], strict=True))
    medians = ", ".join(f"{way} {statistics.median(rate):.1f} rows/s" for way, rate in rates.items())
    Console().print(f"{options.model}, {options.rows} rows: {medians}; batch / LLM.chat {ratio:.2f}", highlight=False)


if __name__ == "__main__":
    main()
