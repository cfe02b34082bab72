"""How a step of decoding grows with the context, in total and of a single request.

    .venv/bin/python -m benchmarks.context          # a Llama of SmolLM2-135M's shape, random weights

Reported are medians over the steps, how much of the machine's bandwidth reading weights, keys and values takes, and the
speed relative to the shortest context of as many requests.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.command import model_parser, run
from benchmarks.engine import save_random_llama
from vlmserve.engine.engine import Engine
from vlmserve.engine.loading import load
from vlmserve.models.protocols import LoadedModel
from vlmserve.settings.config import EngineConfig
from vlmserve.tools.bench import Figure, Rounds, answer_length, measure_limits

POSITIONS = 20_000


def save_long_llama(folder: Path) -> Path:
    """A Llama of SmolLM2-135M's shape with random weights and room for long contexts."""
    save_random_llama(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": POSITIONS}))
    return folder


def measure(options: argparse.Namespace, folder: Path, console: Console) -> dict[str, Any]:
    configs = {kind: _config(options, folder, kind) for kind in options.kv_cache_dtype}
    engines = {kind: _engine(config, folder) for kind, config in configs.items()}
    [dtype] = {model.dtype for _, model in engines.values()}
    limits = measure_limits(next(model for _, model in engines.values()))
    rounds = {kind: Rounds(*engine, limits, "none") for kind, engine in engines.items()}
    plan = [
        (count, length) for count in options.at_once for length in options.lengths if count * length <= options.most
    ]
    figures: dict[tuple[str, int, int], list[Figure]] = {}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(plan) * len(rounds) * options.turns)
        for _ in range(options.turns):
            for count, length in plan:
                progress.update(task, description=f"{count} with {length} tokens")
                for kind, taken in rounds.items():
                    answer = answer_length(configs[kind], count, length, options.steps)
                    figures.setdefault((kind, count, length), []).append(taken.decode(count, length, answer))
                    progress.advance(task)
    shortest: dict[tuple[str, int], float] = {}
    rows: list[dict[str, Any]] = []
    for (kind, count, length), several in figures.items():
        milliseconds = statistics.median(figure.milliseconds for figure in several)
        rows.append(
            {
                "at_once": count,
                "length": length,
                "kv_cache_dtype": kind,
                "ms": milliseconds,
                "of_bandwidth": statistics.median(figure.of_bandwidth for figure in several),
                "of_shortest": shortest.setdefault((kind, count), milliseconds) / milliseconds,
            }
        )
    return {
        "model": options.model or "random Llama of SmolLM2-135M's shape",
        "dtype": str(dtype).removeprefix("torch."),
        "rows": rows,
    }


def _config(options: argparse.Namespace, folder: Path, kv_cache_dtype: str) -> EngineConfig:
    return EngineConfig(
        model=str(folder), device=options.device, dtype=options.dtype, kv_cache_memory=options.kv_cache_memory,
        kv_cache_dtype=kv_cache_dtype, enable_prefix_caching=False, step_seconds=math.inf, speculation="off",
    )  # fmt: skip


def _engine(config: EngineConfig, folder: Path) -> tuple[Engine, LoadedModel]:
    model = load(config, folder)
    return Engine.from_model(config, model), model


def show(report: dict[str, Any], console: Console) -> None:
    console.print(f"[bold]{report['model']}[/], {report['dtype']}", highlight=False)
    table = Table("at once", "context", "KV cache", "step ms", "of bandwidth", "speed, of the\nshortest context")
    for row in report["rows"]:
        table.add_row(
            str(row["at_once"]), f"{row['length']:,}", row["kv_cache_dtype"], f"{row['ms']:.2f}",
            f"{row['of_bandwidth']:.0%}", f"{row['of_shortest']:.2f}",
        )  # fmt: skip
    console.print(table)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = model_parser("benchmarks.context", __doc__, "a random Llama of SmolLM2-135M's shape")
    parser.add_argument("--at-once", type=int, nargs="*", default=[1, 16], help="requests that decode together")
    parser.add_argument("--lengths", type=int, nargs="*", default=[500, 1000, 2000, 4000, 8000, 16000])
    parser.add_argument("--most", type=int, default=32000, help="tokens of context in all; more is left out")
    parser.add_argument("--kv-cache-dtype", nargs="*", default=["auto"], choices=("auto", "int8"), help="take turns")
    parser.add_argument("--turns", type=int, default=1, help="medians of so many are shown")
    parser.add_argument("--steps", type=int, default=16)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    run(parse(arguments), save_long_llama, measure, show)


if __name__ == "__main__":
    main()
