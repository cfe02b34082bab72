"""How a step of decoding grows with the context, in total and of a single request.

    .venv/bin/python -m benchmarks.context          # a Llama of SmolLM2-135M's shape, random weights

Reported are medians over the steps, how much of the machine's bandwidth reading weights, keys and values takes, and the
speed relative to the shortest context of as many requests.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

from benchmarks.command import model_parser, run
from benchmarks.engine import save_random_llama
from vlmserve.bench import memory_bandwidth
from vlmserve.config import EngineConfig
from vlmserve.engine.engine import Engine, load
from vlmserve.layers.linear import Weight
from vlmserve.types import EngineRequest, Prompt, SamplingParams

POSITIONS = 20_000
WARM_UP_STEPS = 3


def save_long_llama(folder: Path) -> Path:
    """A Llama of SmolLM2-135M's shape with random weights and room for long contexts."""
    save_random_llama(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": POSITIONS}))
    return folder


def step_seconds(engine: Engine, count: int, length: int, steps: int) -> float:
    """The median step in which `count` requests with `length` tokens of context generate a token each."""
    draw = random.Random(length * count)
    for number in range(count):
        tokens = [draw.randrange(engine.info.vocab_size // 4, engine.info.vocab_size // 2) for _ in range(length)]
        params = SamplingParams(temperature=0, max_tokens=WARM_UP_STEPS + steps, ignore_eos=True)
        engine.add(EngineRequest(str(number), Prompt(tokens), params))
    seconds = []
    before = time.perf_counter()
    while engine.has_work():
        outputs = engine.step()
        now = time.perf_counter()
        if len(outputs) == count:
            seconds.append(now - before)
        before = now
    return statistics.median(seconds[WARM_UP_STEPS:])


def measure(options: argparse.Namespace, folder: Path, console: Console) -> dict[str, Any]:
    config = EngineConfig(
        model=str(folder), device=options.device, dtype=options.dtype, kv_cache_memory=options.kv_cache_memory,
        enable_prefix_caching=False,
    )  # fmt: skip
    model = load(config, folder)
    engine = Engine.from_model(config, model)
    assert isinstance(model.language_model, nn.Module)
    weight_bytes = sum(module.num_bytes for module in model.language_model.modules() if isinstance(module, Weight))
    token_bytes = model.language_model.cache_bytes_per_block(config.block_size) / config.block_size
    bandwidth = memory_bandwidth(model.device)
    rows: list[dict[str, Any]] = []
    plan = [
        (count, length) for count in options.at_once for length in options.lengths if count * length <= options.most
    ]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(plan))
        for count, length in plan:
            progress.update(task, description=f"{count} with {length} tokens")
            seconds = step_seconds(engine, count, length, options.steps)
            shortest = next((row for row in rows if row["at_once"] == count), None)
            moved = weight_bytes + count * length * token_bytes
            rows.append(
                {
                    "at_once": count,
                    "length": length,
                    "ms": 1e3 * seconds,
                    "of_bandwidth": moved / seconds / bandwidth,
                    "of_shortest": 1.0 if shortest is None else shortest["ms"] / (1e3 * seconds),
                }
            )
            progress.advance(task)
    return {"model": options.model or "random Llama of SmolLM2-135M's shape", "dtype": engine.info.dtype, "rows": rows}


def show(report: dict[str, Any], console: Console) -> None:
    console.print(f"[bold]{report['model']}[/], {report['dtype']}", highlight=False)
    table = Table("at once", "context", "step ms", "of bandwidth", "speed, of the\nshortest context")
    for row in report["rows"]:
        table.add_row(
            str(row["at_once"]), f"{row['length']:,}", f"{row['ms']:.2f}", f"{row['of_bandwidth']:.0%}",
            f"{row['of_shortest']:.2f}",
        )  # fmt: skip
    console.print(table)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = model_parser("benchmarks.context", __doc__, "a random Llama of SmolLM2-135M's shape")
    parser.add_argument("--at-once", type=int, nargs="*", default=[1, 16], help="requests that decode together")
    parser.add_argument("--lengths", type=int, nargs="*", default=[500, 1000, 2000, 4000, 8000, 16000])
    parser.add_argument("--most", type=int, default=32000, help="tokens of context in all; more is left out")
    parser.add_argument("--steps", type=int, default=16)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    run(parse(arguments), save_long_llama, measure, show)


if __name__ == "__main__":
    main()
