"""One model by vlmserve's own layers and by transformers', in the same engine, taking turns in one run.

    python -m benchmarks.implementations --family internvl

The models have the shapes of Qwen3-VL-2B, InternVL3.5-2B (images of at most 6 tiles), Ministral 3 3B, GLM-OCR and
PaddleOCR-VL, with 4 layers of their decoders, 6 of their vision towers, and random weights. Engine, cache and the
decoder's attention are vlmserve's both times; `--model-impl` says whose code the rest is. Questions are about new
images of 640 x 480, two at once, with answers of 16 tokens; texts are prompts of 256 random tokens, two at once, with
answers of 32. With `--quantize`, vlmserve's layers have weights of 8 or 4 bits, those of the tower too; transformers'
code runs without quantization.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from benchmarks.command import keep
from benchmarks.peers import processor, version
from benchmarks.random_models import RANDOM_MODELS, load_processors
from benchmarks.worker import Worker, serve, start_workers
from vlmserve import LLM, SamplingParams

IMPLEMENTATIONS = ("vlmserve", "transformers")
AT_ONCE, ANSWER_LEN, IMAGE_SIZE = 2, 16, (640, 480)
TEXT_LEN, TEXT_ANSWER_LEN = 256, 32


def questions(seed: int) -> list[Any]:
    random = np.random.default_rng(seed)
    width, height = IMAGE_SIZE
    images = [Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8)) for _ in range(AT_ONCE)]
    return [
        [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What is it?"}]}]
        for image in images
    ]


def texts(seed: int) -> list[Any]:
    random = np.random.default_rng(seed)
    return [{"prompt_token_ids": random.integers(10, 1000, TEXT_LEN).tolist()} for _ in range(AT_ONCE)]


def serve_implementation(name: str, folder: Path, family: str, quantize: str) -> None:
    """An implementation's own process."""
    settings: dict[str, Any] = {"quantize": quantize, "quantize_vision": True}
    if name == "transformers":
        load_processors(RANDOM_MODELS[family])
        settings = {}
    llm = LLM(
        str(folder), model_impl=name, dtype="bfloat16", device="cpu", kv_cache_memory="1GiB", load="lazy", **settings
    )

    def load() -> None:
        llm.load()
        for kind in KINDS:
            run((kind, KINDS[kind](10**6)))

    def run(work: tuple[str, list[Any]]) -> None:
        kind, requests = work
        length = ANSWER_LEN if kind == "images" else TEXT_ANSWER_LEN
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        answer = llm.chat if kind == "images" else llm.generate
        results = answer(requests, params, use_tqdm=False)
        assert all(len(result.outputs[0].token_ids) == length for result in results)

    serve(load, lambda request: (request["kind"], KINDS[request["kind"]](request["seed"])), run)


KINDS = {"images": questions, "texts": texts}


def measure(workers: Sequence[Worker], turns: int) -> list[dict[str, Any]]:
    """Both implementations in turns: medians of their seconds, and of the turns' ratios."""
    figures = []
    for kind in KINDS:
        seconds: dict[str, list[float]] = {worker.name: [] for worker in workers}
        for turn in range(turns):
            for worker in workers:
                seconds[worker.name].append(worker.run(kind=kind, seed=turn))
        ratios = [theirs / ours for ours, theirs in zip(*seconds.values(), strict=True)]
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        figures.append({"kind": kind, **medians, "ratio": statistics.median(ratios), "ratios": ratios})
    return figures


def show(report: dict[str, Any], console: Console) -> None:
    console.print(
        f"{report['machine']}; transformers {report['transformers']}; {report['family']}, weights quantized: "
        f"{report['quantize']}; {report['turns']} turns"
    )
    table = Table(f"{AT_ONCE} at once", *(f"{name} s" for name in IMPLEMENTATIONS), "times as fast", "in each turn")
    for row in report["figures"]:
        spread = ", ".join(f"{ratio:.2f}" for ratio in row["ratios"])
        table.add_row(row["kind"], *(f"{row[name]:.2f}" for name in IMPLEMENTATIONS), f"{row['ratio']:.2f}", spread)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    description = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.implementations", description=description)
    parser.add_argument("--family", choices=RANDOM_MODELS, default="qwen3-vl")
    parser.add_argument("--model", type=Path, help="folder of a model of that family; default: one with random weights")
    parser.add_argument(
        "--out", type=Path, default=Path("build/implementations"), help="for logs and the default model"
    )
    parser.add_argument(
        "--quantize", choices=("none", "int8", "int4", "w8a8"), default="none", help="weights of vlmserve's layers"
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    parser.add_argument("--serve", choices=IMPLEMENTATIONS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve_implementation(options.serve, options.model, options.family, options.quantize)
        return
    console = Console()
    folder = options.model or options.out / options.family
    if options.model is None and not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        RANDOM_MODELS[options.family].write(folder)
    common = ["--family", options.family, "--model", str(folder), "--quantize", options.quantize]
    arguments_of = {name: ["--serve", name, *common] for name in IMPLEMENTATIONS}
    with start_workers("benchmarks.implementations", arguments_of, options.out, console) as workers:
        if len(workers) < len(IMPLEMENTATIONS):
            raise SystemExit(1)
        figures = measure(workers, options.turns)
    machine, transformers = processor(), version("transformers")
    report = {
        "machine": machine, "transformers": transformers, "family": options.family,
        "quantize": options.quantize, "turns": options.turns, "figures": figures,
    }  # fmt: skip
    show(report, console)
    keep(report, options)


if __name__ == "__main__":
    main()
