"""Embeddings compared with prefill, and decisions about an image compared with chats, interleaved.

    python -m benchmarks.retrieval
    python -m benchmarks.retrieval --texts 200 --vlm pixie --turns 3 --json report.json
    python -m benchmarks.retrieval --texts 0 --vlm Qwen/Qwen3-VL-2B-Instruct --quantize int4

Embeddings run on SmolLM2-135M's shape with random weights. "Of prefill" divides their tokens/s by those of the same
prompts with answers of one token. Nothing is cached. Decisions are predicates about one new image. "Of chats together"
divides the time of as many chats with a JSON schema, all at once, by the time of the decisions. "Of chats in turn"
divides the time of these chats one after the other. Each way gets an image of its own, and its questions share the
prefix cache. In rows with a cached image, a chat about the image came before, and its time does not count. Figures are
medians of the turns' ratios. Store a report in `benchmarks/results/server/MACHINE`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.command import keep, show_rows, span
from benchmarks.delta import ratios
from benchmarks.peers import version
from benchmarks.random_models import RANDOM_MODELS
from benchmarks.sizes import SHAPES
from benchmarks.sizes_files import write_checkpoint
from vlmserve import LLM, SamplingParams
from vlmserve.frontend.deciding import Question
from vlmserve.types import Grammar

NOTES = (
    "Of prefill: tokens/s of embeddings divided by those of the same prompts with answers of one token. "
    "Of chats: time of chats with a JSON schema divided by the time of decisions. Cached image: a chat about it came "
    "before and does not count. Medians of interleaved turns."
)
COLUMNS = ("work", "model", "requests", "seconds", "of prefill", "of chats together", "of chats in turn")
IMAGES = ("new", "cached")
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


def decision_row(llm: LLM, name: str, questions: int, size: int, turns: int, *, cached: bool) -> list[Any]:
    """Predicates about a square image of noise. size: its width. cached: a chat about the image comes before."""
    seeds = itertools.count()
    statements = [f"{number} shapes are in the image." for number in range(questions)]
    params = SamplingParams(temperature=0, max_tokens=64, grammar=Grammar.json(SCHEMA))
    shown: list[dict[str, Any]] = []

    def ask(text: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [*shown, {"type": "text", "text": text}]}]

    def prepare() -> None:
        pixels = np.random.default_rng(next(seeds)).integers(0, 256, (size, size, 3), np.uint8)
        shown[:] = [{"type": "image", "image": Image.fromarray(pixels)}]
        if cached:
            llm.chat(ask("Describe the image."), SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)

    def chats() -> list[list[dict[str, Any]]]:
        return [
            ask(f'{one} Is this true? Answer with {{"answer": "yes"}} or {{"answer": "no"}}.') for one in statements
        ]

    def decide() -> None:
        content = [{"role": "user", "content": [*shown]}]
        llm.decide(content, [Question.predicate(one) for one in statements], use_tqdm=False)

    def in_turn() -> None:
        for chat in chats():
            llm.chat(chat, params, use_tqdm=False)

    others = [lambda: llm.chat(chats(), params, use_tqdm=False), in_turn]
    seconds, relative = ratios(decide, others, turns, prepare)
    work = "decisions, cached image" if cached else "decisions"
    return [work, name, questions, _rounded(seconds), None, *map(_rounded, relative)]


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _vlm(name: str, folder: Path) -> str:
    """The name or folder of a model with images."""
    if name not in RANDOM_MODELS:
        return name
    (folder / name).mkdir()
    RANDOM_MODELS[name].write(folder / name)
    return str(folder / name)


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
        weights = {} if options.quantize is None else {"quantize": options.quantize}
        for name in options.vlm:
            with LLM(_vlm(name, folder), kv_cache_memory="1GiB", **weights) as llm:
                sizes = (options.questions, options.image_size, options.turns)
                rows += [decision_row(llm, name, *sizes, cached=image == "cached") for image in options.images]
    report = {
        "title": "Embeddings and decisions" if options.texts else "Decisions",
        "command": " ".join(["python -m benchmarks.retrieval", *(arguments or sys.argv[1:])]),
        "model": ", ".join([options.shape] * (options.texts > 0) + options.vlm),
        "weights": "random",
        "versions": {package: version(package) for package in ("vlmserve", "torch")},
        "columns": list(COLUMNS),
        "rows": [["" if cell is None else cell for cell in row] for row in rows],
        "notes": NOTES,
    }
    show_rows(report)
    keep(report, options)


if __name__ == "__main__":
    main()
