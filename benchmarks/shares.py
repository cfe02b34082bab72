"""Decode and prompts as shares of what the machine can do, and compared with llama.cpp on the same GGUF file.

    python -m benchmarks.shares --shape qwen3.5-2b --kinds BF16 Q4_K_M --json report.json

Both systems stay loaded in processes of their own and take turns. "Of bandwidth" divides the bytes of weights and
states that a step of one sequence reads by its time and by the rate at which a sum reads memory in the same turns.
"Of torch.mm" divides the floating-point operations of the prompt's linear layers by the time of the whole prompt and by
the rate of `torch.mm` at the shapes of these layers, in float32 or bfloat16, whichever is faster. Figures are medians.
vlmserve runs without drafts and without prefix caching. Store a report in `benchmarks/results/engines/MACHINE`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from benchmarks.command import keep, show_rows
from benchmarks.peers import is_installed, version
from benchmarks.random_models import RANDOM_MODELS
from benchmarks.sizes import SHAPES
from benchmarks.sizes_files import write_checkpoint, write_gguf

SHORT_PROMPT: Final = 8
"""Tokens of prompts before answers."""
MAX_CONTEXT: Final = 2048
READ_BYTES: Final = 1 << 30
"""Of the tensor that a sum reads."""
COLUMNS: Final = (
    "Weights", "Work", "vlmserve, tokens/s", "llama.cpp, tokens/s", "vlmserve / llama.cpp", "Of bandwidth",
    "Of torch.mm",
)  # fmt: skip


class System(Protocol):
    """One of the compared systems, in its own process."""

    def generate(self, prompts: Sequence[list[int]], answer: int) -> None:
        """Compute prompts and this many tokens of answers, all sequences at once."""


class _Vlmserve:
    def __init__(self, file: str, streams: int, kernels: str) -> None:
        from vlmserve import LLM

        self._llm = LLM(
            file,
            kv_cache_memory="1GiB",
            max_model_len=MAX_CONTEXT,
            max_num_seqs=streams,
            enable_prefix_caching=False,
            speculation="off",
            kernels=kernels,
            weights_cache_size=0,
        )
        self._llm.load()

    def generate(self, prompts: Sequence[list[int]], answer: int) -> None:
        from vlmserve import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


class _Llama:
    """llama.cpp with one batch for all sequences."""

    def __init__(self, file: str, streams: int) -> None:
        import llama_cpp

        self._library = llama_cpp
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = MAX_CONTEXT * streams, MAX_CONTEXT, 512
        options.n_seq_max = streams
        options.n_threads = options.n_threads_batch = os.cpu_count()
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(MAX_CONTEXT, 0, 1)

    def generate(self, prompts: Sequence[list[int]], answer: int) -> None:
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)
        tokens = [
            (token, place, number, place == len(prompt) - 1)
            for number, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        for step in range(answer):
            chosen = self._decode(tokens)
            length = len(prompts[0]) + step
            tokens = [(token, length, number, True) for number, token in enumerate(chosen)]

    def _decode(self, tokens: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Compute tokens with position, sequence and whether logits are wanted; return the most likely next tokens."""
        import numpy as np

        batch, wanted = self._batch, []
        batch.n_tokens = len(tokens)
        for index, (token, place, sequence, speaks) in enumerate(tokens):
            batch.token[index], batch.pos[index], batch.logits[index] = token, place, speaks
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            wanted += [index] * speaks
        if self._library.llama_decode(self._context, batch):
            raise RuntimeError("llama.cpp computed no step")
        rows = (self._library.llama_get_logits_ith(self._context, index) for index in wanted)
        kind = ctypes.POINTER(ctypes.c_float)
        return [int(np.ctypeslib.as_array(ctypes.cast(row, kind), (self._vocabulary,)).argmax()) for row in rows]


def serve(job: dict[str, Any]) -> None:
    """Load a system and answer one line of JSON for each: prompts, tokens of an answer -> seconds."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    if job["system"] == "vlmserve":
        system: System = _Vlmserve(job["file"], job["streams"], job["kernels"])
    else:
        system = _Llama(job["file"], job["streams"])
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        prompts, answer = json.loads(line)
        started = time.perf_counter()
        system.generate(prompts, answer)
        print(time.perf_counter() - started, file=answers, flush=True)


class Loaded:
    """A system in a process that waits for work."""

    def __init__(self, **job: Any) -> None:
        command = [sys.executable, "-m", "benchmarks.shares", "--serve", json.dumps(job)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._read()
        self._vocabulary, self._starts = job["vocabulary"], 0

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a system ended with status {self._process.wait()}")
        return line

    def seconds(self, count: int, length: int, answer: int) -> float:
        """Seconds of new prompts of `length` tokens, and answers."""
        assert self._process.stdin is not None
        prompts = []
        for _ in range(count):
            self._starts += 1
            prompts.append([(self._starts * 7919 + 31 * i) % self._vocabulary for i in range(length)])
        print(json.dumps([prompts, answer]), file=self._process.stdin, flush=True)
        return float(self._read())

    def decode_rate(self, count: int, answer: int) -> float:
        """Tokens per second of all sequences together, without their first ones."""
        first = self.seconds(count, SHORT_PROMPT, 1)
        return count * answer / max(1e-6, self.seconds(count, SHORT_PROMPT, 1 + answer) - first)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def read_rate(repeats: int = 5) -> float:
    """Bytes per second that a sum reads with all threads, the best of several."""
    import torch

    tensor = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    tensor.sum()
    best = math.inf
    for _ in range(repeats):
        started = time.perf_counter()
        tensor.sum()
        best = min(best, time.perf_counter() - started)
    return READ_BYTES / best


def mm_rate(shapes: Sequence[tuple[int, int]], rows: int) -> float:
    """FLOP/s of `torch.mm` over linear layers of these shapes, in float32 or bfloat16, whichever is faster."""
    import torch

    rates: list[float] = []
    for dtype in (torch.float32, torch.bfloat16):
        pairs = [(torch.randn(rows, k).to(dtype), torch.randn(n, k).to(dtype)) for n, k in shapes]
        torch.mm(pairs[0][0][:8], pairs[0][1].T)
        taken = []
        for x, weight in pairs:
            started = time.perf_counter()
            torch.mm(x, weight.T)
            taken.append(time.perf_counter() - started)
            if rates and sum(taken) > 3 * flops(shapes, rows) / rates[0]:
                break  # no instructions for bfloat16
        else:
            rates.append(flops(shapes, rows) / sum(taken))
    return max(rates)


def flops(shapes: Sequence[tuple[int, int]], rows: int) -> float:
    return 2.0 * rows * sum(n * k for n, k in shapes)


def read_of(file: Path) -> tuple[int, list[tuple[int, int]]]:
    """Bytes of a GGUF file that a step reads, and shapes of the linear layers in front of the head."""
    from gguf import GGUFReader

    tensors = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    skipped = {"token_embd.weight"} if "output.weight" in tensors else set()
    read = sum(int(tensor.n_bytes) for name, tensor in tensors.items() if name not in skipped)
    shapes = [
        (int(tensor.shape[1]), int(tensor.shape[0]))
        for name, tensor in tensors.items()
        if name.startswith("blk.") and len(tensor.shape) == 2 and min(tensor.shape) >= 16
    ]
    return read, shapes


def state_bytes(config: dict[str, Any]) -> int:
    """Bytes of the states of one sequence that a step of gated delta layers reads and writes."""
    if "linear_num_value_heads" not in config:
        return 0
    head = config.get("linear_key_head_dim", 128) * config.get("linear_value_head_dim", 128)
    layers = config["num_hidden_layers"] * 3 // 4
    return int(2 * 4 * layers * config["linear_num_value_heads"] * head)


def rows_of(file: Path, kind: str, options: argparse.Namespace) -> list[list[Any]]:
    """Rows of the report about one file."""
    config = SHAPES[options.shape].text
    job = {"file": str(file), "streams": options.streams, "vocabulary": config["vocab_size"]}
    systems = [Loaded(system="vlmserve", kernels=options.kernels, **job)]
    if is_installed("llama-cpp-python"):
        systems.append(Loaded(system="llama.cpp", **job))
    read, shapes = read_of(file)
    read += state_bytes(config)
    measured: dict[str, list[list[float]]] = {}
    shares: dict[str, list[float]] = {}
    one, several, prompt = "decode, 1", f"decode, {options.streams}", f"prompt of {options.prompt}"
    try:
        for system in systems:
            system.seconds(1, options.prompt, 2)
            system.seconds(options.streams, SHORT_PROMPT, 3)
        for _ in range(options.turns):
            rates = [system.decode_rate(1, options.answer) for system in systems]
            measured.setdefault(one, []).append(rates)
            shares.setdefault(one, []).append(rates[0] * read / read_rate())
            rates = [system.decode_rate(options.streams, max(1, options.answer // 2)) for system in systems]
            measured.setdefault(several, []).append(rates)
            rates = [options.prompt / system.seconds(1, options.prompt, 1) for system in systems]
            measured.setdefault(prompt, []).append(rates)
            shares.setdefault(prompt, []).append(rates[0] * flops(shapes, 1) / mm_rate(shapes, options.prompt))
    finally:
        for system in systems:
            system.close()
    return [
        [
            kind,
            work,
            *_medians(turns),
            round(statistics.median(shares[one]), 2) if work == one else "",
            round(statistics.median(shares[prompt]), 2) if work == prompt else "",
        ]
        for work, turns in measured.items()
    ]


def _medians(turns: Sequence[Sequence[float]]) -> tuple[float | str, ...]:
    """Median rates of vlmserve and of llama.cpp, and the median of their ratios."""
    own = round(statistics.median(turn[0] for turn in turns), 2)
    if len(turns[0]) == 1:
        return own, "", ""
    other = round(statistics.median(turn[1] for turn in turns), 2)
    return own, other, round(statistics.median(turn[0] / turn[1] for turn in turns), 2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all kinds and show a table."""
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shares", description=description)
    parser.add_argument(
        "--shape", choices=[name for name, shape in SHAPES.items() if not shape.vision], default="qwen3.5-2b"
    )
    parser.add_argument("--kinds", nargs="+", default=["BF16", "Q4_K_M"], help="types in GGUF files")
    parser.add_argument("--streams", type=int, default=16, help="sequences at once")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--answer", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--kernels", default="auto", help="vlmserve's instruction set")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="keep files here and use those that are there")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve is not None:
        serve(options.serve)
        return
    shape = SHAPES[options.shape]
    rows: list[list[Any]] = []
    with tempfile.TemporaryDirectory(prefix="vlmserve-shares-") as temporary:
        place = options.folder or Path(temporary)
        shapes = place / f"{options.shape}-shapes"
        if not shapes.exists():
            write_checkpoint(shapes, shape.model_class, shape.text, None, RANDOM_MODELS["qwen3-vl"], with_weights=False)
        for kind in options.kinds:
            file = place / f"{options.shape}-{kind}.gguf"
            if not file.exists():
                write_gguf(file, shapes, kind)
            rows += rows_of(file, kind, options)
    packages = ["vlmserve", "torch", *(["llama-cpp-python"] if is_installed("llama-cpp-python") else [])]
    report = {
        "title": "Shares of the machine, and llama.cpp",
        "command": " ".join(["python -m benchmarks.shares", *(sys.argv[1:] if arguments is None else arguments)]),
        "model": options.shape,
        "weights": "random",
        "versions": {package: version(package) for package in packages},
        "columns": list(COLUMNS),
        "rows": rows,
    }
    show_rows(report)
    keep(report, options)


if __name__ == "__main__":
    main()
