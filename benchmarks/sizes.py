"""Models of published sizes with random weights: seconds to ready, peak memory, and speed, compared with llama.cpp.

    python -m benchmarks.sizes --shapes qwen3-0.6b qwen3-vl-2b --json report.json
    python -m benchmarks.sizes --shapes llama-1b llama-1b-262k --quantize int4 --gguf Q4_K_M Q6_K IQ4_XS
    python -m benchmarks.sizes --shapes qwen3-30b-a3b-24l --quantize --gguf Q4_K_M --folder files --keep --starts 1
    python -m benchmarks.sizes --shapes qwen3-0.6b gemma3-1b --quantize --gguf Q4_K_M Q6_K Q8_0 Q4_0 --busy

Checkpoints are written tensor by tensor, so that the largest need little memory. Each system runs in a process of its
own, one after the other. It starts twice, and vlmserve's second start maps its cache of packed weights. A third process
measures speed without speculation: random weights repeat tokens, which drafts would guess. With --starts 1, one process
does both, without the cache. llama.cpp reads the same GGUF files, and is left out where llama-cpp-python is not
installed. Store a report in `benchmarks/results/engines/MACHINE`.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import io
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.command import keep
from benchmarks.peers import is_installed, versions
from benchmarks.random_models import RANDOM_MODELS
from benchmarks.sizes_files import write_checkpoint, write_gguf

TEXT_KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True)
class Shape:
    """A published model, or some of its layers.

    sizes: of `TEXT_KEYS`. config: other fields of its config. vision: fields of a tower.
    """

    model_class: str
    sizes: tuple[int, int, int, int, int]
    config: Mapping[str, Any]
    vision: Mapping[str, Any] | None = None

    @property
    def text(self) -> dict[str, Any]:
        """Fields of the language model's config."""
        return {**dict(zip(TEXT_KEYS, self.sizes, strict=True)), **self.config}


_QWEN = {"head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 32768}
_QWEN35 = {
    "head_dim": 256,
    "vocab_size": 248320,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
}
_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048}
SHAPES = {
    "tiny": Shape("LlamaForCausalLM", (64, 128, 2, 4, 2), {"vocab_size": 2048, "max_position_embeddings": 2048}),
    "tiny-vl": Shape(
        "Qwen3VLForConditionalGeneration",
        (64, 128, 3, 4, 2),
        {"head_dim": 16, "vocab_size": 2048, "max_position_embeddings": 4096},
        {"depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 64},
    ),
    "tiny-gemma3": Shape(
        "Gemma3ForCausalLM",
        (64, 128, 6, 4, 1),
        {"head_dim": 32, "vocab_size": 2048, "max_position_embeddings": 2048, "sliding_window": 512},
    ),
    "tiny-qwen3.5": Shape(
        "Qwen3_5ForCausalLM",
        (256, 256, 4, 4, 2),
        {
            "head_dim": 64,
            "vocab_size": 2048,
            "max_position_embeddings": 2048,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
    ),
    "tiny-qwen3-moe": Shape(
        "Qwen3MoeForCausalLM",
        (256, 256, 2, 4, 2),
        {
            "head_dim": 64,
            "vocab_size": 2048,
            "max_position_embeddings": 2048,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "norm_topk_prob": True,
        },
    ),
    "smollm2-135m": Shape(
        "LlamaForCausalLM",
        (576, 1536, 30, 9, 3),
        {"vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True},
    ),
    "qwen3-0.6b": Shape("Qwen3ForCausalLM", (1024, 3072, 28, 16, 8), {**_QWEN, "tie_word_embeddings": True}),
    "llama-1b": Shape(
        "LlamaForCausalLM",
        (2048, 8192, 16, 32, 8),
        {"vocab_size": 128256, "max_position_embeddings": 32768, "tie_word_embeddings": True},
    ),
    "llama-1b-262k": Shape(
        "LlamaForCausalLM",
        (2048, 8192, 16, 32, 8),
        {"vocab_size": 262144, "max_position_embeddings": 32768, "tie_word_embeddings": True},
    ),
    "gemma3-1b": Shape(
        "Gemma3ForCausalLM",
        (1152, 6912, 26, 4, 1),
        {"head_dim": 256, "vocab_size": 262144, "max_position_embeddings": 32768, "sliding_window": 512},
    ),
    "qwen3-4b": Shape("Qwen3ForCausalLM", (2560, 9728, 36, 32, 8), {**_QWEN, "tie_word_embeddings": True}),
    "llama-8b": Shape(
        "LlamaForCausalLM", (4096, 14336, 32, 32, 8), {"vocab_size": 128256, "max_position_embeddings": 8192}
    ),
    "qwen3.5-2b": Shape("Qwen3_5ForCausalLM", (2048, 6144, 24, 8, 2), _QWEN35),
    "qwen3-30b-a3b-24l": Shape(
        "Qwen3MoeForCausalLM",
        (2048, 6144, 24, 32, 4),
        {
            **_QWEN,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-vl-2b": Shape("Qwen3VLForConditionalGeneration", (2048, 6144, 28, 16, 8), _QWEN, _TOWER),
}
SHORT_PROMPT = 8
"""Tokens before an answer that is timed: a long prompt's noise would hide the time of the answer."""
REPEATS = 3
"""Runs of which the fastest counts."""
COLUMNS = (
    "System", "Ready, s", "Second start, s", "Peak at ready, MB", "Prompt, tokens/s", "Decode, tokens/s",
    "Four users, s", "Photo, s",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What a process measures. vision: it also asks about a photo. only_start: nothing after the start."""

    system: str
    model: str
    options: Mapping[str, Any]
    vocabulary: int
    vision: bool
    prompt_tokens: int
    answer_tokens: int
    photo_size: tuple[int, int]
    only_start: bool = False


def measure(job: Job) -> dict[str, float | None]:
    """Load the model of a job and time it, in this process."""
    measured = _Llama(job) if job.system == "llama.cpp" else _Vlmserve(job)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print("ready", file=sys.stderr, flush=True)
    for thread in threading.enumerate():
        if thread.name == "weights-cache":
            thread.join()  # the disk has a share of the memory's bandwidth
    if job.only_start:
        return {"peak": peak}

    starts = itertools.count(1)  # llama.cpp would compute no prefix of an earlier prompt again

    def seconds(count: int, length: int, answer: int) -> float:
        prompts = [
            [(start + 31 * i) % job.vocabulary for i in range(length)] for start in itertools.islice(starts, count)
        ]
        started = time.perf_counter()
        measured.generate(prompts, answer)
        return time.perf_counter() - started

    seconds(1, job.prompt_tokens, 2)
    runs = [
        (seconds(1, job.prompt_tokens, 1), seconds(1, SHORT_PROMPT, 1), seconds(1, SHORT_PROMPT, 1 + job.answer_tokens))
        for _ in range(REPEATS)
    ]
    prompt, first, whole = map(min, zip(*runs, strict=True))
    return {
        "peak": peak,
        "prompt": job.prompt_tokens / prompt,
        "decode": job.answer_tokens / max(whole - first, 1e-6),
        "users": seconds(4, job.prompt_tokens, 1),
        "photo": measured.photo() if job.vision else None,
    }


class _Vlmserve:
    def __init__(self, job: Job) -> None:
        from vlmserve import LLM

        self._job = job
        self._llm = LLM(
            job.model,
            kv_cache_memory="512MiB",
            enable_prefix_caching=False,
            speculation="auto" if job.only_start else "off",
            **job.options,
        )
        self._llm.load()

    def generate(self, prompts: Sequence[list[int]], answer: int) -> None:
        from vlmserve import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    def photo(self) -> float:
        import numpy as np
        from PIL import Image

        from vlmserve import SamplingParams

        width, height = self._job.photo_size
        pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG")
        url = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
        started = time.perf_counter()
        self._llm.chat([{"role": "user", "content": parts}], SamplingParams(max_tokens=1), use_tqdm=False)
        return time.perf_counter() - started


class _Llama:
    def __init__(self, job: Job) -> None:
        from llama_cpp import Llama

        threads = os.cpu_count()
        self._llama = Llama(job.model, n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)

    def generate(self, prompts: Sequence[list[int]], answer: int) -> None:
        for prompt in prompts:
            tokens = self._llama.generate(prompt, temp=0.0, repeat_penalty=1.0, reset=True)
            for _ in range(answer):
                next(tokens)

    def photo(self) -> None:
        """It has no tower."""


def run_job(job: Job) -> dict[str, Any]:
    """The figures of a job, from a process of its own. Raises RuntimeError with the end of its log if it fails."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.sizes", "--job", json.dumps(job.__dict__)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stdout is not None
    log, ready = [], 0.0
    for line in process.stderr:
        log.append(line)
        if line == "ready\n":
            ready = time.perf_counter() - started
    answer = process.stdout.read()
    if process.wait():
        raise RuntimeError(f"{job.system} ended with status {process.returncode}:\n{''.join(log[-20:])}")
    return {"ready": ready, **json.loads(answer)}


def gguf_file(folder: Path, name: str, kind: str) -> Path:
    """Return the GGUF file of a shape without a vision tower. It is written if it is not in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    file, shape = folder / f"{name}-{kind}.gguf", SHAPES[name]
    shapes = folder / f"{name}-shapes"
    if not shapes.exists():
        write_checkpoint(shapes, shape.model_class, shape.text, None, RANDOM_MODELS["qwen3-vl"], with_weights=False)
    if not file.exists():
        write_gguf(file, shapes, kind)
    return file


def rows(name: str, options: argparse.Namespace, folder: Path, cache: Mapping[str, Any]) -> Iterator[list[Any]]:
    """A row of the report for each system on one shape. cache: vlmserve's options for packed weights."""
    shape = SHAPES[name]
    common = {
        "vocabulary": shape.text["vocab_size"],
        "prompt_tokens": options.prompt_tokens,
        "answer_tokens": options.answer_tokens,
        "photo_size": tuple(options.photo_size),
    }
    with_weights = bool(options.quantize)
    checkpoint = folder / (name if with_weights else f"{name}-shapes")
    if not checkpoint.exists():
        tokens = RANDOM_MODELS["qwen3-vl"]
        write_checkpoint(checkpoint, shape.model_class, shape.text, shape.vision, tokens, with_weights=with_weights)
    for scheme in options.quantize:
        settings = {"quantize": scheme, "dtype": "bfloat16", **cache}
        job = Job("vlmserve", str(checkpoint), settings, vision=shape.vision is not None, **common)
        yield from _rows(f"{name}, vlmserve {scheme}", job, options)
    for kind in options.gguf if shape.vision is None else ():
        file = folder / f"{name}-{kind}.gguf"
        if not file.exists():
            write_gguf(file, checkpoint, kind)
        job = Job("vlmserve", str(file), cache, vision=False, **common)
        yield from _rows(f"{name}, vlmserve {kind}", job, options)
        if is_installed("llama-cpp-python"):
            job = Job("llama.cpp", str(file), {}, vision=False, **common)
            yield from _rows(f"{name}, llama.cpp {kind}", job, options)
        if not options.keep:
            file.unlink()


def _rows(name: str, job: Job, options: argparse.Namespace) -> Iterator[list[Any]]:
    """With `--busy`, adds a row of the same system next to a process that computes all the time."""
    if options.starts == 1:
        yield _row(name, run_job(job), None)
    else:
        first, second = (run_job(dataclasses.replace(job, only_start=True)) for _ in range(2))
        yield _row(name, {**run_job(job), **first}, second["ready"])
    if options.busy:
        other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            yield _row(f"{name}, one busy process", run_job(job), None)
        finally:
            other.kill()
            other.wait()


def _row(name: str, figures: Mapping[str, Any], second: float | None) -> list[Any]:
    found = (figures["ready"], second, *(figures[key] for key in ("peak", "prompt", "decode", "users", "photo")))
    return [name, *(None if value is None else float(f"{value:.4g}") for value in found)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure shapes and show a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sizes", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen3-0.6b", "qwen3-vl-2b", "llama-8b"])
    parser.add_argument("--quantize", nargs="*", default=["none", "int4"], help="schemes of vlmserve")
    parser.add_argument(
        "--gguf", nargs="*", default=["Q4_0", "Q8_0"], help="types of GGUF files, or mixtures: Q4_K_M, Q5_K_M"
    )
    parser.add_argument("--busy", action="store_true", help="measure again next to one busy process")
    parser.add_argument("--starts", type=int, choices=(1, 2), default=2, help="1: only one, without a weights cache")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--photo-size", type=int, nargs=2, default=(1024, 768), metavar=("WIDTH", "HEIGHT"))
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; default: a temporary folder")
    parser.add_argument("--keep", action="store_true", help="use checkpoints that are in --folder, and keep them there")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.job is not None:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # output of libraries must not mix with the answer
        print(json.dumps(measure(Job(**options.job))), file=answers, flush=True)
        return
    if options.keep and options.folder is None:
        parser.error("--keep needs --folder")
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="vlmserve-sizes-", dir=options.folder) as temporary:
        place = Path(temporary)
        folder = options.folder if options.keep else place
        cache = {"weights_cache": str(place / "cache")} if options.starts > 1 else {"weights_cache_size": 0}
        found = [row for name in options.shapes for row in rows(name, options, folder, cache)]
    table = Table(*COLUMNS)
    for row in found:
        table.add_row(*("" if value is None else str(value) for value in row))
    Console().print(table)
    report = {
        "title": "Models of published sizes",
        "command": " ".join(["python -m benchmarks.sizes", *(arguments or sys.argv[1:])]),
        "model": ", ".join(options.shapes),
        "weights": "random",
        "versions": versions("llama-cpp-python"),
        "columns": list(COLUMNS),
        "rows": found,
        "plot": ["Decode, tokens/s"],
    }
    keep(report, options)


if __name__ == "__main__":
    main()
