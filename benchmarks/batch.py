"""What batches cost beside `LLM.chat` on the same rows: the journal of `vlmserve batch`, and a server's /v1/batches.

    .venv/bin/python -m benchmarks.batch --rows 400

All take turns, the first two in this process with one loaded model, the third in a server with another one. Every turn
draws other images, so that nothing is cached. Of /v1/batches the time from the batch's creation to its end counts.
"""

from __future__ import annotations

import argparse
import base64
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np
from PIL import Image
from rich.console import Console

from benchmarks.soak import server
from vlmserve.batch.answers import LocalAnswers
from vlmserve.batch.rows import Question, Row, read_rows
from vlmserve.batch.run import run_batch
from vlmserve.settings.config import EngineConfig, MediaConfig
from vlmserve.types import SamplingParams

QUESTION = Question("How many shapes are there?")
CHAT, BATCH, SERVER = "LLM.chat", "vlmserve batch", "/v1/batches"


def save_images(folder: Path, count: int, seed: int) -> list[Row]:
    """A folder of that many images of noise, as rows."""
    folder.mkdir()
    draw = np.random.default_rng(seed)
    for number in range(count):
        pixels = draw.integers(0, 256, (64, 64, 3), np.uint8)
        Image.fromarray(pixels).resize((256, 256)).save(folder / f"{number:05}.jpg")
    return read_rows(str(folder))


def upload(client: httpx.Client, model: str, images: Sequence[Path], max_tokens: int) -> str:
    """Upload the rows as a file of requests; its id."""
    lines = []
    for path in images:
        url = "data:image/jpeg;base64," + base64.b64encode(path.read_bytes()).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION.prompt}]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": max_tokens,
            "ignore_eos": True,
        }
        lines.append(
            json.dumps({"custom_id": path.name, "method": "POST", "url": "/v1/chat/completions", "body": body})
        )
    files = {"file": ("rows.jsonl", "\n".join(lines).encode(), "application/jsonl")}
    return client.post("/v1/files", data={"purpose": "batch"}, files=files).raise_for_status().json()["id"]


def answer(client: httpx.Client, file_id: str, count: int) -> None:
    """Have an uploaded file answered. Raises RuntimeError unless all rows are."""
    batch = client.post("/v1/batches", json={"input_file_id": file_id, "endpoint": "/v1/chat/completions"}).json()
    while batch["status"] in ("validating", "in_progress", "finalizing"):
        time.sleep(0.02)
        batch = client.get(f"/v1/batches/{batch['id']}").json()
    if batch["request_counts"]["completed"] != count:
        raise RuntimeError(f"the batch has not answered all rows: {batch}")


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
    rates: dict[str, list[float]] = {CHAT: [], BATCH: [], SERVER: []}
    with (
        tempfile.TemporaryDirectory() as folder,
        server([options.model, "--storage-url", f"sqlite:///{folder}/history.db"]) as (url, _),
        httpx.Client(base_url=url, timeout=600) as client,
    ):
        name = client.get("/v1/models").json()["data"][0]["id"]
        for repeat in range(options.repeats + 1):
            for number, way in enumerate(sorted(rates, reverse=repeat % 2 == 1)):
                images = Path(folder, f"{repeat} {number}")
                rows = save_images(images, options.rows, hash((repeat, way)) % 2**32)
                file_id = upload(client, name, sorted(images.iterdir()), options.max_tokens) if way == SERVER else ""
                begin = time.perf_counter()
                if way == SERVER:
                    answer(client, file_id, len(rows))
                elif way == BATCH:
                    run_batch(rows, QUESTION, params, Path(folder, f"{repeat}.jsonl"), lambda: answers)
                else:
                    answers.llm.chat([QUESTION.messages(row) for row in rows], params, use_tqdm=False)
                if repeat:  # the first turn warms up
                    rates[way].append(len(rows) / (time.perf_counter() - begin))
    console = Console()
    for way, found in rates.items():
        ratio = statistics.median(one / other for one, other in zip(found, rates[CHAT], strict=True))
        rate = f"{statistics.median(found):.1f} rows/s, {ratio:.2f} x {CHAT}"
        console.print(f"{options.model}, {options.rows} rows, {way}: {rate}", highlight=False)


if __name__ == "__main__":
    main()
