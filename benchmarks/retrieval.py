"""Embeddings compared with prefill, and decisions about an image compared with chats, interleaved.

    python -m benchmarks.retrieval
    python -m benchmarks.retrieval --texts 200 --vlm pixie --turns 3 --json report.json
    python -m benchmarks.retrieval --texts 0 --vlm qwen3-vl-2b --quantize int4 --through python --turns 1

Embeddings run on SmolLM2-135M's shape with random weights. "Of prefill" divides their tokens/s by those of the same
prompts with answers of one token. Nothing is cached. Decisions are predicates about one new image. "Of chats together"
divides the time of as many chats with a JSON schema, all at once, by the time of the decisions. "Of chats in turn"
divides the time of these chats one after the other. Each way gets an image of its own, and its questions share the
prefix cache. A chat comes before, whose time does not count: about another image, or in rows with a cached image about
the same one. Rows of the server send JPEG files to `/v1/decisions` and `/v1/chat/completions`, over connections that
stay open. Figures are medians of the turns' ratios. Store a report in `benchmarks/results/server/MACHINE`.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import io
import itertools
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

from benchmarks.command import keep, show_rows, span
from benchmarks.delta import ratios
from benchmarks.peers import version
from benchmarks.random_models import RANDOM_MODELS
from benchmarks.sizes import SHAPES
from benchmarks.sizes_files import write_checkpoint
from benchmarks.soak import serving
from vlmserve import LLM, SamplingParams
from vlmserve.frontend.deciding import Question
from vlmserve.types import Grammar

NOTES = (
    "Of prefill: tokens/s of embeddings divided by those of the same prompts with answers of one token. "
    "Of chats: time of chats with a JSON schema divided by the time of decisions. Cached image: a chat about it came "
    "before. Server: over HTTP, images as JPEG files. Medians of interleaved turns."
)
COLUMNS = ("work", "model", "requests", "seconds", "of prefill", "of chats together", "of chats in turn")
IMAGES = ("new", "cached")
THROUGH = ("python", "server")
DESCRIBE = "Describe the image."
MAX_TOKENS = 64
KV_CACHE = "1GiB"
HEADERS = {"Content-Type": "application/json"}
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
}


def embedding_row(llm: LLM, name: str, texts: int, lengths: tuple[int, int], turns: int) -> list[Any]:
    """Texts of random tokens. llm: without a prefix cache. lengths: the shortest and the longest."""
    draw = np.random.default_rng(0)
    prompts = [
        {"prompt_token_ids": draw.integers(10, 1000, draw.integers(lengths[0], lengths[1] + 1)).tolist()}
        for _ in range(texts)
    ]
    one = SamplingParams(temperature=0, max_tokens=1)
    seconds, [relative] = ratios(
        lambda: llm.embed(prompts, use_tqdm=False),
        [lambda: llm.generate(prompts, one, use_tqdm=False)],
        turns,
    )
    return ["embeddings", name, texts, _rounded(seconds), _rounded(relative), None, None]


class Ways(NamedTuple):
    """Ways to ask about an image, which `show` makes of pixels."""

    show: Callable[[Image.Image], Any]
    see: Callable[[Any], None]
    """Chat, so that the image is cached."""
    decide: Callable[[Any], None]
    chat: Callable[[Any, Sequence[str]], None]
    """Chat about statements, all at once."""


def ways_in_python(llm: LLM, statements: Sequence[str]) -> Ways:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, grammar=Grammar.json(SCHEMA))
    one_token = SamplingParams(temperature=0, max_tokens=1)

    def ask(image: Image.Image, *texts: str) -> list[dict[str, Any]]:
        content = [{"type": "image", "image": image}, *({"type": "text", "text": text} for text in texts)]
        return [{"role": "user", "content": content}]

    def see(image: Image.Image) -> None:
        llm.chat(ask(image, DESCRIBE), one_token, use_tqdm=False)

    def decide(image: Image.Image) -> None:
        llm.decide(ask(image), [Question.predicate(one) for one in statements], use_tqdm=False)

    def chat(image: Image.Image, some: Sequence[str]) -> None:
        llm.chat([ask(image, asked(one)) for one in some], params, use_tqdm=False)

    return Ways(lambda image: image, see, decide, chat)


def ways_through_server(url: str, statements: Sequence[str], pool: Executor) -> Ways:
    """pool: a thread for each statement."""
    kept = threading.local()

    def post(path: str, **fields: Any) -> None:
        if not hasattr(kept, "connection"):
            kept.connection = http.client.HTTPConnection(urlsplit(url).netloc)
        kept.connection.request("POST", path, json.dumps({"model": "default", **fields}), HEADERS)
        response = kept.connection.getresponse()
        text = response.read()
        if response.status != HTTPStatus.OK:
            raise RuntimeError(f"{path}: {text.decode()}")

    def ask(shown: str, text: str, **fields: Any) -> None:
        content = [{"type": "image_url", "image_url": {"url": shown}}, {"type": "text", "text": text}]
        post("/v1/chat/completions", messages=[{"role": "user", "content": content}], temperature=0, **fields)

    def check(shown: str, one: str) -> None:
        schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
        ask(shown, asked(one), max_tokens=MAX_TOKENS, response_format=schema)

    def decide(shown: str) -> None:
        content = [{"role": "user", "content": [{"type": "input_image", "image_url": shown}]}]
        post(
            "/v1/decisions", input=content, questions=[{"type": "predicate", "instructions": one} for one in statements]
        )

    def chat(shown: str, some: Sequence[str]) -> None:
        list(pool.map(partial(check, shown), some))

    return Ways(as_url, lambda shown: ask(shown, DESCRIBE, max_tokens=1), decide, chat)


def as_url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def asked(statement: str) -> str:
    return f'{statement} Is this true? Answer with {{"answer": "yes"}} or {{"answer": "no"}}.'


def decision_row(ways: Ways, statements: Sequence[str], size: int, turns: int, *, cached: bool) -> list[Any]:
    """Predicates about a square image: seconds and ratios.

    size: its width. cached: a chat about it comes before, else one about another image, so that threads are awake.
    """
    seeds = itertools.count()
    shown: list[Any] = []

    def show() -> Any:
        coarse = np.random.default_rng(next(seeds)).integers(0, 256, (24, 24, 3), np.uint8)
        return ways.show(Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC))

    def prepare() -> None:
        shown[:] = [show()]
        ways.see(shown[0] if cached else show())

    def in_turn() -> None:
        for one in statements:
            ways.chat(shown[0], [one])

    others = [lambda: ways.chat(shown[0], statements), in_turn]
    seconds, relative = ratios(lambda: ways.decide(shown[0]), others, turns, prepare)
    return [_rounded(seconds), None, *map(_rounded, relative)]


def decision_rows(model: str, name: str, options: argparse.Namespace) -> list[list[Any]]:
    """model: the name or folder to load."""
    statements = [f"{number} shapes are in the image." for number in range(options.questions)]
    rows: list[list[Any]] = []

    def measure(ways: Ways, work: str) -> None:
        for image in options.images:
            found = decision_row(ways, statements, options.image_size, options.turns, cached=image == "cached")
            rows.append([f"{work}, cached image" if image == "cached" else work, name, len(statements), *found])

    if "python" in options.through:
        weights = {} if options.quantize is None else {"quantize": options.quantize}
        with LLM(model, kv_cache_memory=KV_CACHE, **weights) as llm:
            measure(ways_in_python(llm, statements), "decisions")
    if "server" in options.through:
        flags = [] if options.quantize is None else ["--quantize", options.quantize]
        names = ["--served-model-name", "default", "--kv-cache-memory", KV_CACHE]
        with ThreadPoolExecutor(len(statements)) as pool, serving("serve", model, *names, *flags) as (url, _):
            measure(ways_through_server(url, statements, pool), "decisions, server")
    return rows


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _vlm(name: str, folder: Path) -> str:
    """The name or folder of a model with images."""
    if name in SHAPES:
        shape = SHAPES[name]
        write_checkpoint(folder / name, shape.model_class, shape.text, shape.vision, RANDOM_MODELS["qwen3-vl"])
    elif name in RANDOM_MODELS:
        (folder / name).mkdir()
        RANDOM_MODELS[name].write(folder / name)
    else:
        return name
    return str(folder / name)


def _models(names: Sequence[str]) -> dict[str, str]:
    """Fields of a report."""
    are_random = [name in SHAPES or name in RANDOM_MODELS for name in names]
    if not any(are_random):
        return {"model": ", ".join(names), "weights": "published"}
    marked = [name if one else f"{name} (published weights)" for name, one in zip(names, are_random, strict=True)]
    return {"model": ", ".join(marked), "weights": "random"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and show a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.retrieval", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m", help="of the model that embeds")
    parser.add_argument("--texts", type=int, default=1000, help="texts to embed (default 1000; 0: only decide)")
    parser.add_argument("--text-tokens", type=span, default=(8, 32), metavar="LOW-HIGH")
    parser.add_argument(
        "--vlm", nargs="*", default=["pixie", "qwen3-vl"], help="models that decide: names, folders, or random ones"
    )
    parser.add_argument("--quantize", choices=["int8", "int4"], help="weights of models that decide")
    parser.add_argument("--questions", type=int, default=32)
    parser.add_argument(
        "--images", nargs="+", choices=IMAGES, default=IMAGES, help="images of decisions (default: both)"
    )
    parser.add_argument("--through", nargs="+", choices=THROUGH, default=THROUGH, help="ways to ask (default: both)")
    parser.add_argument("--image-size", type=int, default=448)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    options = parser.parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory(prefix="vlmserve-retrieval-") as place:
        folder, shape = Path(place), SHAPES[options.shape]
        if options.texts:
            write_checkpoint(folder / "text", shape.model_class, shape.text, None, RANDOM_MODELS["qwen3-vl"])
            with LLM(str(folder / "text"), kv_cache_memory="512MiB", enable_prefix_caching=False) as llm:
                rows.append(embedding_row(llm, options.shape, options.texts, options.text_tokens, options.turns))
        for name in options.vlm:
            rows += decision_rows(_vlm(name, folder), name, options)
    report = {
        "title": "Embeddings and decisions" if options.texts else "Decisions",
        "command": " ".join(["python -m benchmarks.retrieval", *(arguments or sys.argv[1:])]),
        **_models([options.shape] * (options.texts > 0) + options.vlm),
        "versions": {package: version(package) for package in ("vlmserve", "torch")},
        "columns": list(COLUMNS),
        "rows": [["" if cell is None else cell for cell in row] for row in rows],
        "notes": NOTES,
    }
    show_rows(report)
    keep(report, options)


if __name__ == "__main__":
    main()
