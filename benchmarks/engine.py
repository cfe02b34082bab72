"""How fast the engine is, next to transformers' `generate` in the same run.

    .venv/bin/python -m benchmarks.engine                       # a random Llama of SmolLM2-135M's shape
    .venv/bin/python -m benchmarks.engine --model pixie --images

Both answer the same requests: prompts and answers of mixed lengths, greedy, all sent at once. transformers gets one
left-padded batch and runs until its longest answer is done. The two take turns, and medians over the repeats are
reported. Each request's tokens are compared too, so a fast wrong engine shows.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.command import model_parser, run, span
from vlmserve.devices.pixels import Normalizer
from vlmserve.engine.engine import Engine
from vlmserve.settings.config import EngineConfig
from vlmserve.tools.bench import memory_bandwidth, noise_image
from vlmserve.types import KEY_BYTES, EngineRequest, ImageInput, ImageSpan, Prompt, SamplingParams

PLACEHOLDER = 0


@dataclass(frozen=True)
class Job:
    """One request: a prompt and how many tokens to answer, whatever the model says."""

    prompt: Prompt
    num_tokens: int


@dataclass(frozen=True)
class Run:
    """One pass over all jobs. Times are seconds since all were sent; `tokens` are each job's."""

    seconds: float
    first_token: list[float]
    per_token: list[float]
    tokens: list[list[int]]


@dataclass(frozen=True)
class EngineRun(Run):
    """overheads: seconds outside the models of each step in which all jobs ran at once."""

    overheads: list[float]


@dataclass(frozen=True)
class Row:
    """What is reported for one number of concurrent requests: medians; times in milliseconds."""

    concurrency: int
    engine_tokens_per_s: float
    transformers_tokens_per_s: float
    throughput_ratio: float
    engine_ttft_ms: float
    transformers_ttft_ms: float
    engine_tpot_ms: float
    transformers_tpot_ms: float
    step_overhead_ms: float | None
    same_tokens: float


def make_jobs(
    count: int, *, vocab_size: int, seed: int, prompt_lens: tuple[int, int], answer_lens: tuple[int, int],
    image: ImageInput | None = None, uniform: bool = False,
) -> list[Job]:  # fmt: skip
    """Random prompts with mixed lengths, in random order; a single one has the longest.

    Lengths are spread evenly over the logarithms of the ranges, both ends included: many short, few long, as in chats.

    uniform: spread them over the ranges themselves instead, where a padded batch loses less.
    image: what every prompt begins with, each time as a new image, so that nothing is found in a cache.
    """
    draw = random.Random(seed)
    lengths = []
    for low, high in (prompt_lens, answer_lens):
        shares = [i / max(count - 1, 1) for i in range(count)]
        spread = [round(high - (high - low) * s if uniform else high * (low / high) ** s) for s in shares]
        draw.shuffle(spread)
        lengths.append(spread)
    jobs = []
    for prompt_len, answer_len in zip(*lengths, strict=True):
        text = [draw.randrange(vocab_size // 4, vocab_size // 2) for _ in range(prompt_len)]
        if image is None:
            jobs.append(Job(Prompt(text), answer_len))
        else:
            fresh = msgspec.structs.replace(image, key=draw.randbytes(KEY_BYTES))
            jobs.append(Job(Prompt([PLACEHOLDER] * fresh.num_tokens + text, (ImageSpan(fresh, 0),)), answer_len))
    return jobs


def run_engine(engine: Engine, jobs: Sequence[Job]) -> EngineRun:
    started = time.perf_counter()
    for index, job in enumerate(jobs):
        params = SamplingParams(temperature=0, max_tokens=job.num_tokens, ignore_eos=True)
        engine.add(EngineRequest(str(index), job.prompt, params))
    tokens: list[list[int]] = [[] for _ in jobs]
    times: list[list[float]] = [[] for _ in jobs]
    overheads = []
    while engine.has_work():
        outputs = engine.step()
        now = time.perf_counter() - started
        if len(outputs) == len(jobs):
            overheads.append(engine.timings.overhead)
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
            index = int(output.request_id)
            tokens[index] += output.token_ids
            times[index] += [now] * len(output.token_ids)
    seconds = time.perf_counter() - started
    per_token = [(one[-1] - one[0]) / (len(one) - 1) for one in times if len(one) > 1]
    return EngineRun(seconds, [one[0] for one in times], per_token, tokens, overheads)


def run_transformers(model: Any, jobs: Sequence[Job], image_token_id: int | None) -> Run:
    """One left-padded batch, as long as the longest answer."""
    from transformers import LogitsProcessor, LogitsProcessorList

    class Clock(LogitsProcessor):  # type: ignore[misc]
        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if scores.is_cuda:
                torch.cuda.synchronize()
            self.times.append(time.perf_counter() - started)
            return scores

    longest_prompt = max(len(job.prompt.token_ids) for job in jobs)
    longest_answer = max(job.num_tokens for job in jobs)
    started = time.perf_counter()
    input_ids = torch.zeros(len(jobs), longest_prompt, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    for row, job in enumerate(jobs):
        ids = list(job.prompt.token_ids)
        for place in job.prompt.images:
            ids[place.start : place.end] = [image_token_id] * place.image.num_tokens
        input_ids[row, longest_prompt - len(ids) :] = torch.tensor(ids)
        attention_mask[row, longest_prompt - len(ids) :] = 1
    normalize = Normalizer(torch.device("cpu"))
    inputs = [span.image for job in jobs for span in job.prompt.images]
    images = [normalize(torch.tensor(one.pixels), one.levels, torch.float32) for one in inputs if one.levels]
    extra = {"pixel_values": torch.cat(images).to(model.device, model.dtype)} if images else {}
    clock = Clock()
    with torch.inference_mode():
        output = model.generate(
            input_ids=input_ids.to(model.device),
            attention_mask=attention_mask.to(model.device),
            min_new_tokens=longest_answer,
            max_new_tokens=longest_answer,
            do_sample=False,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([clock]),
            **extra,
        )
    answers = output[:, longest_prompt:].tolist()
    seconds = time.perf_counter() - started
    tokens = [answer[: job.num_tokens] for answer, job in zip(answers, jobs, strict=True)]
    per_token = [(clock.times[-1] - clock.times[0]) / (len(clock.times) - 1)] if len(clock.times) > 1 else []
    return Run(seconds, [clock.times[0]] * len(jobs), per_token, tokens)


def summarize(runs: Sequence[EngineRun], peers: Sequence[Run]) -> Row:
    """runs, peers: of the same jobs, pairwise; each pair's jobs want as many tokens."""
    wanted = sum(map(len, runs[0].tokens))
    overheads = [overhead for run in runs for overhead in run.overheads]
    equal = [
        ours == theirs
        for run, peer in zip(runs, peers, strict=True)
        for ours, theirs in zip(run.tokens, peer.tokens, strict=True)
    ]

    def rate(some: Sequence[Run]) -> float:
        return wanted / statistics.median(run.seconds for run in some)

    def milliseconds(some: Sequence[Run], what: str) -> float:
        values = [statistics.median(getattr(run, what)) for run in some if getattr(run, what)]
        return 1e3 * statistics.median(values) if values else math.nan

    return Row(
        concurrency=len(runs[0].tokens),
        engine_tokens_per_s=rate(runs),
        transformers_tokens_per_s=rate(peers),
        throughput_ratio=rate(runs) / rate(peers),
        engine_ttft_ms=milliseconds(runs, "first_token"),
        transformers_ttft_ms=milliseconds(peers, "first_token"),
        engine_tpot_ms=milliseconds(runs, "per_token"),
        transformers_tpot_ms=milliseconds(peers, "per_token"),
        step_overhead_ms=1e3 * statistics.median(overheads) if overheads else None,
        same_tokens=sum(equal) / len(equal),
    )


def bytes_per_decoded_token(model: Any) -> int:
    """Bytes of weights that a decode step at one request reads: all of the decoder's but a separate embedding."""
    decoder = getattr(model, "language_model", None) or getattr(getattr(model, "model", None), "language_model", None)
    decoder = model if decoder is None else decoder
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    weights = {weight.data_ptr(): weight.nbytes for weight in decoder.parameters()}
    weights.pop(embedding.data_ptr(), None)
    return sum(weights.values()) + (0 if head.data_ptr() in weights else head.nbytes)


def save_random_llama(folder: Path, *, tiny: bool = False) -> Path:
    """A Llama of SmolLM2-135M's shape (or a tiny one, to try the benchmark itself) with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = (64, 128, 2, 4, 2, 512) if tiny else (576, 1536, 30, 9, 3, 49152)
    hidden, inner, layers, heads, kv_heads, vocab = shape
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def load_peer(folder: Path, engine: Engine) -> Any:
    """The same checkpoint in transformers, with the engine's dtype and device."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    sees = hasattr(AutoConfig.from_pretrained(folder), "vision_config")
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=getattr(torch, engine.info.dtype)).to(engine.info.device)
    return model.eval()


def measure(options: argparse.Namespace, folder: Path, console: Console) -> dict[str, Any]:
    config = EngineConfig(
        model=str(folder), device=options.device, dtype=options.dtype, num_threads=options.threads,
        kv_cache_memory=options.kv_cache_memory, speculation="off",
    )  # fmt: skip
    engine = Engine(config, folder)
    peer = load_peer(folder, engine)
    image = noise_image(folder) if options.images else None
    image_token_id = getattr(peer.config, "image_token_id", None)
    rows = []
    for concurrency in options.concurrency:
        runs: list[EngineRun] = []
        peers: list[Run] = []
        for repeat in range(-1, options.repeats):
            jobs = make_jobs(
                concurrency, vocab_size=engine.info.vocab_size, seed=1000 * concurrency + repeat,
                prompt_lens=options.prompt_lens, answer_lens=options.answer_lens, image=image,
                uniform=options.uniform,
            )  # fmt: skip
            with console.status(f"{concurrency} at once, {repeat + 1} of {options.repeats} ..."):
                if repeat < 0:
                    warm_up = [Job(job.prompt, 2) for job in jobs]
                    run_engine(engine, warm_up), run_transformers(peer, warm_up, image_token_id)
                    continue
                if repeat % 2 == 0:
                    runs.append(run_engine(engine, jobs))
                peers.append(run_transformers(peer, jobs, image_token_id))
                if repeat % 2 == 1:
                    runs.append(run_engine(engine, jobs))
        rows.append(summarize(runs, peers))
    device = torch.device(engine.info.device)
    bandwidth = memory_bandwidth(device)
    weights = bytes_per_decoded_token(peer)
    single = next((row for row in rows if row.concurrency == 1), None)
    return {
        "model": options.model or "random Llama of SmolLM2-135M's shape",
        "parameters": engine.info.num_parameters,
        "dtype": engine.info.dtype,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else engine.info.device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "prompt_lens": options.prompt_lens,
        "answer_lens": options.answer_lens,
        "lengths": "uniform" if options.uniform else "log-uniform",
        "repeats": options.repeats,
        "images": options.images,
        "memory_bandwidth_gb_per_s": bandwidth / 1e9,
        "weights_gb_per_token": weights / 1e9,
        "decode_bandwidth_fraction": weights / (single.engine_tpot_ms / 1e3) / bandwidth if single else None,
        "rows": [asdict(row) for row in rows],
    }


def show(report: dict[str, Any], console: Console) -> None:
    console.print(
        f"[bold]{report['model']}[/]: {report['parameters'] / 1e6:.1f} M parameters, {report['dtype']}, "
        f"{report['device']}, {report['threads']} threads, torch {report['torch']}; prompts of "
        f"{report['prompt_lens'][0]}-{report['prompt_lens'][1]} tokens{' after an image' * report['images']}, "
        f"answers of {report['answer_lens'][0]}-{report['answer_lens'][1]}, {report['lengths']}; "
        f"medians of {report['repeats']}",
        highlight=False,
    )
    table = Table("at\nonce", "", "tokens/s", "ratio", "TTFT\nms", "TPOT\nms", "step over-\nhead ms", "same\ntokens")
    for row in report["rows"]:
        overhead = row["step_overhead_ms"]
        table.add_row(
            str(row["concurrency"]), "engine", f"{row['engine_tokens_per_s']:.1f}", f"{row['throughput_ratio']:.2f}",
            f"{row['engine_ttft_ms']:.0f}", f"{row['engine_tpot_ms']:.1f}",
            "-" if overhead is None else f"{overhead:.2f}", f"{row['same_tokens']:.0%}",
        )  # fmt: skip
        table.add_row(
            "", "transformers", f"{row['transformers_tokens_per_s']:.1f}", "1.00",
            f"{row['transformers_ttft_ms']:.0f}", f"{row['transformers_tpot_ms']:.1f}", end_section=True,
        )  # fmt: skip
    console.print(table)
    if report["decode_bandwidth_fraction"] is not None:
        console.print(
            f"Decode at 1 reads {report['weights_gb_per_token']:.2f} GB of weights a token: "
            f"{report['decode_bandwidth_fraction']:.0%} of the measured "
            f"{report['memory_bandwidth_gb_per_s']:.1f} GB/s.",
            highlight=False,
        )


def jobs_parser(
    name: str, description: str | None, *, prompt_lens: tuple[int, int], answer_lens: tuple[int, int], **defaults: str
) -> argparse.ArgumentParser:
    """A parser for a benchmark of `make_jobs`' jobs, by default for what `save_random_llama` saves.

    defaults: as for `model_parser`.
    """
    parser = model_parser(name, description, "a random Llama of SmolLM2-135M's shape", **defaults)
    parser.add_argument("--tiny", action="store_true", help="a tiny random Llama, to try the benchmark itself")
    parser.add_argument("--prompt-lens", type=span, default=prompt_lens, metavar="LOW-HIGH")
    parser.add_argument("--answer-lens", type=span, default=answer_lens, metavar="LOW-HIGH")
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = jobs_parser(
        "benchmarks.engine", __doc__, prompt_lens=(8, 64), answer_lens=(4, 48), dtype="float32", kv_cache_memory="1GiB"
    )
    parser.add_argument("--threads", type=int, help="CPU threads for both; default: torch's choice")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--uniform", action="store_true", help="spread lengths evenly, not over their logarithms")
    parser.add_argument("--images", action="store_true", help="start every prompt with the same new image")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    run(options, partial(save_random_llama, tiny=options.tiny), measure, show)


if __name__ == "__main__":
    main()
