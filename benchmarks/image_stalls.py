"""How long streams that generate wait for images of others: a step's time for images bounded, and not.

    .venv/bin/python -m benchmarks.image_stalls --model pixie --every 0.05
    .venv/bin/python -m benchmarks.image_stalls --every 4     # CLIP ViT-L/14-336 before SmolLM2-135M's shape, random

8 streams generate. Meanwhile a request arrives every so many seconds. Three ways take turns in one process:

- text: the requests' prompts are texts of as many tokens as an image and its question have;
- at once: they are new images, each encoded whole in one step (`--encoder-step-share inf --step-seconds inf`);
- bounded: the same, within the default limits.

Reported are medians over the repeats: the streams' inter-token latencies, tokens and images a second until everything
is answered, and when requests that arrive have their first token.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.command import model_parser, run
from benchmarks.image_reuse import save_random_llava
from vlmserve.devices.choice import find_device
from vlmserve.engine.engine import Engine
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.protocols import LoadedModel
from vlmserve.models.registry import load_model
from vlmserve.settings.config import EngineConfig
from vlmserve.tools.bench import noise_image
from vlmserve.types import KEY_BYTES, EngineRequest, ImageSpan, Prompt, SamplingParams

WAYS = ("text", "at once", "bounded")
LIMITS = ("encoder_step_share", "step_seconds")
"""Settings that limit the images of a step."""
QUESTION = 16
"""Tokens of text behind each image."""


@dataclass(frozen=True)
class Outcome:
    """One pass. gaps: seconds between the tokens of streams; first_token: of each request that arrived."""

    seconds: float
    gaps: list[float]
    first_token: list[float]
    tokens: int


@dataclass(frozen=True)
class Row:
    """Of one way. Times in milliseconds."""

    way: str
    p50: float
    p99: float
    longest: float
    tokens_per_s: float
    requests_per_s: float
    ttft: float


class Bench:
    """An engine for each way, over one model."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
        self.model: LoadedModel = load_model(folder, LoadSettings(device=find_device(options.device), dtype=dtype))
        self.options = options
        self.image = noise_image(folder)
        settings: dict[str, Any] = {
            "model": str(folder), "kv_cache_memory": options.kv_cache_memory, "enable_prefix_caching": False,
        }  # fmt: skip
        if options.chunk:
            settings["max_num_batched_tokens"] = options.chunk
        self.engines = {
            way: Engine.from_model(
                EngineConfig(**settings, **(dict.fromkeys(LIMITS, float("inf")) if way == "at once" else {})),
                self.model,
            )
            for way in WAYS
        }

    def arriving(self, way: str, draw: random.Random) -> Prompt:
        text = [draw.randrange(300, 900) for _ in range(QUESTION)]
        count = self.image.num_tokens
        if way == "text":
            return Prompt([draw.randrange(300, 900) for _ in range(count)] + text)
        image = msgspec.structs.replace(self.image, key=draw.randbytes(KEY_BYTES))
        return Prompt([self.model.image_token_id or 0] * count + text, (ImageSpan(image, 0),))

    def run(self, way: str, seed: int) -> Outcome:
        """Streams of as many tokens as the options say; requests arrive until they end, and all are answered."""
        options, engine, draw = self.options, self.engines[way], random.Random(seed)
        answer = SamplingParams(temperature=0, max_tokens=options.answer, ignore_eos=True)
        stream = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
        for number in range(options.streams):
            engine.add(EngineRequest(f"stream {number}", Prompt([draw.randrange(300, 900) for _ in range(32)]), stream))
        while len(engine.step()) < options.streams:
            pass
        started = time.perf_counter()
        last = dict.fromkeys((f"stream {number}" for number in range(options.streams)), started)
        gaps: list[float] = []
        arrived: dict[str, float] = {}
        first_token: list[float] = []
        tokens, waiting = 0, options.requests
        while engine.has_work() or waiting:
            now = time.perf_counter() - started
            while waiting and (options.requests - waiting + 0.5) * options.every <= now:
                name = str(waiting)
                arrived[name] = (options.requests - waiting + 0.5) * options.every
                engine.add(EngineRequest(name, self.arriving(way, draw), answer))
                waiting -= 1
            if not engine.has_work():
                time.sleep(0.0005)
                continue
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                tokens += len(output.token_ids)
                if output.request_id in last:
                    gaps.append(now - last[output.request_id])
                    last[output.request_id] = now
                elif (at := arrived.pop(output.request_id, None)) is not None:
                    first_token.append(now - started - at)
        return Outcome(time.perf_counter() - started, gaps, first_token, tokens)


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def summary(way: str, outcomes: Sequence[Outcome], requests: int) -> Row:
    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    return Row(
        way,
        1e3 * median([percentile(one.gaps, 0.5) for one in outcomes]),
        1e3 * median([percentile(one.gaps, 0.99) for one in outcomes]),
        1e3 * median([max(one.gaps) for one in outcomes]),
        median([one.tokens / one.seconds for one in outcomes]),
        median([requests / one.seconds for one in outcomes]),
        1e3 * median([median(one.first_token) for one in outcomes]),
    )


def measure(options: argparse.Namespace, folder: Path, console: Console) -> dict[str, Any]:
    bench = Bench(folder, options)
    outcomes: dict[str, list[Outcome]] = {way: [] for way in options.only or WAYS}
    for repeat in range(options.repeats + 1):
        for way, done in outcomes.items():
            outcome = bench.run(way, repeat)
            if repeat:
                done.append(outcome)
                console.print(f"{way}: p99 {1e3 * percentile(outcome.gaps, 0.99):.1f} ms", highlight=False)
    rows = [summary(way, done, options.requests) for way, done in outcomes.items()]
    return {"model": options.model or "random LLaVA", "figures": [asdict(row) for row in rows]}


def show(report: dict[str, Any], console: Console) -> None:
    table = Table("what arrives", "p50 ms", "p99 ms", "longest ms", "tokens/s", "requests/s", "TTFT ms")
    for row in report["figures"]:
        table.add_row(
            row["way"], f"{row['p50']:.2f}", f"{row['p99']:.2f}", f"{row['longest']:.1f}", f"{row['tokens_per_s']:.0f}",
            f"{row['requests_per_s']:.2f}", f"{row['ttft']:.0f}",
        )  # fmt: skip
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = model_parser("benchmarks.image_stalls", __doc__, "a LLaVA with random weights", dtype="bfloat16")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=600, help="of each stream")
    parser.add_argument("--requests", type=int, default=6, help="that arrive")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between arrivals")
    parser.add_argument("--answer", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--chunk", type=int, help="tokens of a step at most")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=WAYS)
    run(parser.parse_args(arguments), save_random_llava, measure, show)


if __name__ == "__main__":
    main()
