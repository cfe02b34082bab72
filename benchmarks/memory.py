"""How much memory the KV cache takes at its peak, next to contiguous caches for the same requests.

    .venv/bin/python -m benchmarks.memory                          # a random Llama of SmolLM2-135M's shape
    .venv/bin/python -m benchmarks.memory --model pixie --requests 64

64 requests of mixed lengths are sent at once. Contiguous caches are counted three ways: each request reserves room for
the model's whole context; each reserves its own prompt and the longest answer that it may get; and transformers'
`generate`, measured, which pads all to the longest. A second run has prompts that begin with the same text.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.command import run
from benchmarks.engine import Job, jobs_parser, load_peer, make_jobs, save_random_llama
from vlmserve.engine.engine import Engine
from vlmserve.settings.config import EngineConfig
from vlmserve.types import EngineRequest, Prompt, SamplingParams


@dataclass(frozen=True)
class Row:
    """Peak bytes for one set of requests."""

    requests: str
    paged: int
    whole_context: int
    longest_answer: int
    transformers: int | None

    @property
    def saving(self) -> float:
        """Of the most frugal contiguous way, the share that paging saves."""
        contiguous = [self.whole_context, self.longest_answer, *([self.transformers] if self.transformers else [])]
        return 1 - self.paged / min(contiguous)


def paged_peak(engine: Engine, jobs: Sequence[Job]) -> int:
    """The most bytes of blocks in use at the end of any step, shared ones counted once."""
    block_bytes = engine.info.kv_cache_bytes // engine.stats().kv_blocks_total
    for index, job in enumerate(jobs):
        params = SamplingParams(temperature=0, max_tokens=job.num_tokens, ignore_eos=True)
        engine.add(EngineRequest(str(index), job.prompt, params))
    peak = 0
    while engine.has_work():
        engine.step()
        peak = max(peak, engine.stats().kv_blocks_used)
    return peak * block_bytes


def bytes_per_token(engine: Engine, block_size: int) -> int:
    return engine.info.kv_cache_bytes // engine.stats().kv_blocks_total // block_size


def transformers_peak(model: Any, jobs: Sequence[Job]) -> int:
    """Bytes of transformers' cache when the longest answer of one padded batch is done."""
    longest = max(len(job.prompt.token_ids) for job in jobs)
    input_ids = torch.zeros(len(jobs), longest, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    for row, job in enumerate(jobs):
        input_ids[row, longest - len(job.prompt.token_ids) :] = torch.tensor(job.prompt.token_ids)
        attention_mask[row, longest - len(job.prompt.token_ids) :] = 1
    count = max(job.num_tokens for job in jobs)
    with torch.inference_mode():
        output = model.generate(
            input_ids=input_ids.to(model.device),
            attention_mask=attention_mask.to(model.device),
            min_new_tokens=count,
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
        )
    layers = output.past_key_values.layers
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)


def measure(options: argparse.Namespace, folder: Path, console: Console) -> dict[str, Any]:
    config = EngineConfig(
        model=str(folder), device=options.device, dtype=options.dtype, kv_cache_memory=options.kv_cache_memory,
        max_num_seqs=options.requests, max_num_batched_tokens=options.requests * options.prompt_lens[1],
    )  # fmt: skip
    engine = Engine(config, folder)
    mixed = make_jobs(
        options.requests, vocab_size=engine.info.vocab_size, seed=1, prompt_lens=options.prompt_lens,
        answer_lens=options.answer_lens,
    )  # fmt: skip
    common = [5 + index % 97 for index in range(options.prompt_lens[1])]
    shared = [Job(Prompt(common + job.prompt.token_ids), job.num_tokens) for job in mixed]
    peer = None if options.no_peer else load_peer(folder, engine)
    per_token = bytes_per_token(engine, config.block_size)
    rows = []
    for name, jobs in (("mixed lengths", mixed), ("with a common beginning", shared)):
        with console.status(f"{name} ..."):
            answer = max(job.num_tokens for job in jobs)
            rows.append(
                Row(
                    requests=name,
                    paged=paged_peak(engine, jobs),
                    whole_context=len(jobs) * engine.info.max_model_len * per_token,
                    longest_answer=sum(len(job.prompt.token_ids) + answer for job in jobs) * per_token,
                    transformers=None if peer is None else transformers_peak(peer, jobs),
                )
            )
    return {
        "model": options.model or "random Llama of SmolLM2-135M's shape",
        "dtype": engine.info.dtype,
        "requests": options.requests,
        "prompt_lens": options.prompt_lens,
        "answer_lens": options.answer_lens,
        "rows": [asdict(row) | {"saving": row.saving} for row in rows],
    }


def show(report: dict[str, Any], console: Console) -> None:
    console.print(
        f"[bold]{report['model']}[/], {report['dtype']}: {report['requests']} requests at once, prompts of "
        f"{report['prompt_lens'][0]}-{report['prompt_lens'][1]} tokens, answers of "
        f"{report['answer_lens'][0]}-{report['answer_lens'][1]}; MiB at the peak",
        highlight=False,
    )
    table = Table(
        "requests", "paged", "whole\ncontext", "longest\nanswer", "transformers", "saved of the\nleast of these"
    )
    for row in report["rows"]:
        cells = [row[name] for name in ("paged", "whole_context", "longest_answer", "transformers")]
        table.add_row(
            row["requests"],
            *("-" if cell is None else f"{cell / 1024**2:,.1f}" for cell in cells),
            f"{row['saving']:.0%}",
        )
    console.print(table)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = jobs_parser("benchmarks.memory", __doc__, prompt_lens=(8, 256), answer_lens=(4, 64))
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--no-peer", action="store_true", help="do not run transformers")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    run(options, partial(save_random_llama, tiny=options.tiny), measure, show)


if __name__ == "__main__":
    main()
