"""One model by one process with all threads and by two ranks that share them, taking turns in one run.

    python -m benchmarks.ranks

By default the shape of Qwen3-0.6B with 14 of its 28 layers and random weights, in bfloat16. Each kind of work is one
call of `LLM.generate`: a prompt of 512 tokens, and answers of 32 tokens for 1 and for 16 requests at once.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.command import keep
from benchmarks.peers import processor
from benchmarks.worker import Worker, serve, start_workers
from vlmserve import LLM, SamplingParams
from vlmserve.models.hub import resolve_model

KINDS = {"prompt of 512": (1, 512, 1), "answer of 32": (1, 16, 32), "16 answers of 32": (16, 16, 32)}
"""Requests at once, tokens of each prompt, tokens of each answer."""


def save_random_qwen3(folder: Path) -> Path:
    """Half of Qwen3-0.6B's layers with random weights, before pixie's tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(resolve_model("pixie") / name, folder)
    config = Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=14, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=151936, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def prompts(kind: str, seed: int) -> list[Any]:
    count, length, _ = KINDS[kind]
    random = np.random.default_rng(seed)
    return [{"prompt_token_ids": random.integers(10, 900, length).tolist()} for _ in range(count)]


def serve_ranks(ranks: int, options: argparse.Namespace) -> None:
    """An engine's own process."""
    llm = LLM(
        str(options.model),
        tensor_parallel_size=ranks,
        num_threads=options.threads,
        dtype=options.dtype,
        device="cpu",
        kv_cache_memory="1GiB",
        load="lazy",
    )

    def load() -> None:
        llm.load()
        for kind in KINDS:
            run((kind, prompts(kind, 10**6)))

    def run(work: tuple[str, list[Any]]) -> None:
        kind, requests = work
        length = KINDS[kind][2]
        results = llm.generate(requests, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True), False)
        assert all(len(result.outputs[0].token_ids) == length for result in results)

    serve(load, lambda request: (request["kind"], prompts(request["kind"], request["seed"])), run)


def measure(workers: Sequence[Worker], turns: int) -> list[dict[str, Any]]:
    """Medians of seconds, and how long several ranks took beside one in each turn."""
    figures = []
    for kind in KINDS:
        seconds: dict[str, list[float]] = {worker.name: [] for worker in workers}
        for turn in range(turns):
            for worker in workers if turn % 2 else workers[::-1]:
                seconds[worker.name].append(worker.run(kind=kind, seed=turn))
        ratios = sorted(several / one for one, several in zip(*seconds.values(), strict=True))
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        figures.append({"kind": kind, **medians, "ratio": statistics.median(ratios), "ratios": ratios})
    return figures


def show(report: dict[str, Any], console: Console) -> None:
    console.print(f"{report['machine']}; {report['threads']} threads in all; {report['turns']} turns")
    names = list(report["loading"])
    table = Table("", *(f"{name}, ms" for name in names), "times as long", "in each turn")
    for row in report["figures"]:
        spread = ", ".join(f"{ratio:.2f}" for ratio in row["ratios"])
        table.add_row(row["kind"], *(f"{row[name] * 1000:.0f}" for name in names), f"{row['ratio']:.2f}", spread)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    description = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=description)
    parser.add_argument("--model", type=Path, help="folder of a model; default: one with random weights")
    parser.add_argument("--out", type=Path, default=Path("build/ranks"), help="for logs and the default model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2, help="of one process, or of all ranks together")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve_ranks(options.serve, options)
        return
    console = Console()
    if options.model is None:
        options.model = options.out / "qwen3"
        if not (options.model / "config.json").exists():
            save_random_qwen3(options.model)
    options.out.mkdir(parents=True, exist_ok=True)
    same = ["--model", str(options.model), "--dtype", options.dtype, "--threads", str(options.threads)]
    arguments_of = {f"{ranks} ranks" if ranks > 1 else "1 rank": [*same, "--serve", str(ranks)]
                    for ranks in (1, options.ranks)}  # fmt: skip
    with start_workers("benchmarks.ranks", arguments_of, options.out, console) as workers:
        if len(workers) < len(arguments_of):
            raise SystemExit(1)
        loading = {worker.name: worker.seconds_to_ready for worker in workers}
        figures = measure(workers, options.turns)
    report = {"machine": processor(), "threads": options.threads, "turns": options.turns, "loading": loading,
              "figures": figures}  # fmt: skip
    show(report, console)
    keep(report, options)


if __name__ == "__main__":
    main()
