"""How a step of decoding grows with the context, in total and of a single request.

    .venv/bin/python -m benchmarks.context          # a Llama of SmolLM2-135M's shape, random weights

Reported are medians over the steps, how much of the machine's bandwidth reading weights, keys and values takes, and the
speed relative to the shortest context of as many requests.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.command import model_parser, run
from benchmarks.engine import save_random_llama
from vlmserve.bench import Limits, Rounds, memory_bandwidth, product_rate
from vlmserve.config import EngineConfig
from vlmserve.engine.engine import Engine, load

POSITIONS = 20_000


def save_long_llama(folder: Path) -> Path:
    """A Llama of SmolLM2-135M's shape with random weights and room for long contexts."""
    save_random_llama(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": POSITIONS}))
    return folder


def measure(options: argparse.Namespace, folder: Path, console: Console) -> dict[str, Any]:
    config = EngineConfig(
        model=str(folder), device=options.device, dtype=options.dtype, kv_cache_memory=options.kv_cache_memory,
        enable_prefix_caching=False,
    )  # fmt: skip
    model = load(config, folder)
    engine = Engine.from_model(config, model)
    limits = Limits(memory_bandwidth(model.device), product_rate(model.device, model.dtype))
    rounds = Rounds(engine, model, limits, "none", options.steps)
    rows: list[dict[str, Any]] = []
    plan = [
        (count, length) for count in options.at_once for length in options.lengths if count * length <= options.most
    ]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(plan))
        for count, length in plan:
            progress.update(task, description=f"{count} with {length} tokens")
            figure = rounds.decode(count, length)
            shortest = next((row["ms"] for row in rows if row["at_once"] == count), figure.milliseconds)
            rows.append(
                {
                    "at_once": count,
                    "length": length,
                    "ms": figure.milliseconds,
                    "of_bandwidth": figure.of_bandwidth,
                    "of_shortest": shortest / figure.milliseconds,
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
