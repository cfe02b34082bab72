"""Photos and documents through the server, as clients send them: first tokens, and what others beside them notice.

    python -m benchmarks.photos                                     # Qwen3-VL-2B's shape in int4, random weights
    python -m benchmarks.photos --model qwen3-vl:2b --json report.json -- --quantize int4

Photos have 4000 x 3000 pixels, documents 30 pages. Users are numbered in the order of their requests. A stream of text
generates beside some of them: its longest pause between two tokens counts, once it has begun. "Text beside" is the
slowest first token of short text requests, one of them each second. A photo is abandoned when its client hangs up after
a second. Store a report in `benchmarks/results/engines/MACHINE`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image, ImageDraw

from benchmarks.command import keep, show_rows
from benchmarks.peers import version
from benchmarks.random_models import RANDOM_MODELS
from benchmarks.sizes import SHAPES
from benchmarks.sizes_files import write_checkpoint
from benchmarks.soak import serving

PHOTO_SIZE = (4000, 3000)
PAGE_SIZE = (1240, 1754)
"""Pixels of an A4 page at 150 dots an inch."""
STREAM_TOKENS = 8000
READABLE_TOKENS = list(range(300, 800))
"""Tokens with whole characters in most vocabularies: others, which random weights choose, send no chunk."""
COLUMNS = ("Case", "First token, s", "Longest pause of a stream, s", "Text beside, s")


def photo(number: int, size: tuple[int, int] = PHOTO_SIZE) -> dict[str, Any]:
    """A part of a message: a JPEG of coloured blobs, others for each number."""
    coarse = np.random.default_rng(number).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return {"type": "image_url", "image_url": {"url": _data_url("image/jpeg", file)}}


def document(pages: int) -> dict[str, Any]:
    """A part of a message: a PDF whose pages have lines of numbers."""
    images = []
    for page in range(pages):
        image = Image.new("L", PAGE_SIZE, 255)
        draw = ImageDraw.Draw(image)
        for line in range(60):
            draw.text((100, 80 + 26 * line), " ".join(str(page * line * step) for step in range(1, 24)), fill=0)
        images.append(image)
    file = io.BytesIO()
    images[0].save(file, "PDF", save_all=True, append_images=images[1:])
    return {"type": "file", "file": {"filename": "numbers.pdf", "file_data": _data_url("application/pdf", file)}}


def _data_url(media_type: str, file: io.BytesIO) -> str:
    return f"data:{media_type};base64,{base64.b64encode(file.getvalue()).decode()}"


class Client:
    """Streams answers and notes when their tokens arrive."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._texts = 0

    async def stream(self, content: list[dict[str, Any]], count: int) -> AsyncIterator[float]:
        """The time of each token of an answer, by `time.perf_counter`. Raises RuntimeError if the request fails."""
        body = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": count,
            "ignore_eos": True,
            "stream": True,
            "allowed_token_ids": READABLE_TOKENS,
            "logprobs": True,  # counts tokens where a chunk has several
        }
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                if response.status_code != 200 or line.startswith('data: {"error'):
                    raise RuntimeError(line)
                if line.startswith("data: {") and (choices := json.loads(line[6:])["choices"]):
                    for _ in (choices[0]["logprobs"] or {}).get("content") or ():
                        yield time.perf_counter()

    async def first_token(self, *parts: dict[str, Any]) -> float:
        """Seconds to the first token of an answer about some parts."""
        sent = time.perf_counter()
        times = [at async for at in self.stream([*parts, {"type": "text", "text": "Describe this."}], 1)]
        return times[0] - sent

    async def text(self) -> float:
        """Seconds to the first token of a short text that no request sent before."""
        self._texts += 1
        return await self.first_token({"type": "text", "text": f"Request {self._texts}."})

    async def beside(self, busy: Coroutine[Any, Any, float]) -> tuple[float, float, float]:
        """What `busy` returns, the longest pause of a stream beside it, and the slowest text request beside it."""
        times: list[float] = []
        generates = asyncio.Event()

        async def generate() -> None:
            async for at in self.stream([{"type": "text", "text": "Count to a thousand."}], STREAM_TOKENS):
                times.append(at)
                generates.set()

        stream = asyncio.create_task(generate())
        await generates.wait()
        begin, task, slowest = time.perf_counter(), asyncio.create_task(busy), 0.0
        while not task.done():
            slowest = max(slowest, await self.text())
            await asyncio.wait([task], timeout=1)
        end = time.perf_counter()
        stream.cancel()
        await asyncio.wait([stream])
        meanwhile = [begin, *(at for at in times if begin <= at <= end), end]
        return await task, max(after - before for before, after in itertools.pairwise(meanwhile)), slowest

    async def after_leaving(self, part: dict[str, Any]) -> float:
        """Seconds of a text request that follows a request whose client hung up after a second."""
        task = asyncio.create_task(self.first_token(part))
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.wait([task])
        return await self.text()


async def measure(url: str, pages: int) -> list[list[Any]]:
    """The rows of the report."""
    rows: list[list[Any]] = []

    def add(case: str, *values: float | None) -> None:
        rows.append([case, *(None if value is None else round(value, 3) for value in values)])
        print(*rows[-1], file=sys.stderr, flush=True)

    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        client = Client(http)
        add("first text", await client.text(), None, None)
        add("second text", await client.text(), None, None)
        add("photo", await client.first_token(photo(0)), None, None)
        add("the same photo again", await client.first_token(photo(0)), None, None)
        times = await asyncio.gather(*(client.first_token(photo(number)) for number in range(1, 5)))
        for place, seconds in enumerate(times, 1):
            add(f"four users with a photo each, number {place}", seconds, None, None)
        add("photo beside a stream", *await client.beside(client.first_token(photo(5))))
        add(f"PDF of {pages} pages beside a stream", *await client.beside(client.first_token(document(pages))))
        add("text after an abandoned photo", await client.after_leaving(photo(6)), None, None)
    return rows


@contextmanager
def model_or_random(name: str | None) -> Iterator[str]:
    """The model that is asked for, or the folder of one with random weights."""
    if name:
        yield name
        return
    shape = SHAPES["qwen3-vl-2b"]
    with tempfile.TemporaryDirectory(prefix="vlmserve-photos-") as place:
        folder = Path(place, "qwen3-vl-2b")
        write_checkpoint(folder, shape.model_class, shape.text, shape.vision, RANDOM_MODELS["qwen3-vl"])
        yield str(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve a model, send it photos and documents, and show a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.photos", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", help="name, folder or id; default: Qwen3-VL-2B's shape with random weights")
    parser.add_argument("--pages", type=int, default=30, help="of the document")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    parser.add_argument("flags", nargs="*", help="further flags of vlmserve serve, behind --")
    options = parser.parse_args(arguments)
    flags = options.flags or ["--quantize", "int4"]
    with model_or_random(options.model) as model, serving("serve", model, *flags) as (url, _):
        rows = asyncio.run(measure(url, options.pages))
    report = {
        "title": "Photos and documents through the server",
        "command": " ".join(["python -m benchmarks.photos", *(arguments or sys.argv[1:])]),
        "model": options.model or "qwen3-vl-2b",
        "weights": "published" if options.model else "random",
        "versions": {package: version(package) for package in ("vlmserve", "torch")},
        "columns": list(COLUMNS),
        "rows": rows,
        "notes": f"vlmserve serve {' '.join(flags)}. One run.",
    }
    show_rows(report)
    keep(report, options)


if __name__ == "__main__":
    main()
