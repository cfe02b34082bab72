"""Decode and prompts as shares of what the machine can do, and compared with llama.cpp on the same GGUF file.

    python -m benchmarks.shares --shape qwen3.5-2b --kinds BF16 Q4_K_M --json report.json

Both systems stay loaded and take turns. "Of bandwidth" divides the bytes of weights and states that a step of one
sequence reads by its time and by the rate at which a sum reads memory in the same turns. Above 1, the step reads faster
than the sum. "Of torch.mm" divides the floating-point operations of the prompt's linear layers by the time of the whole
prompt and by the rate of `torch.mm` at the shapes of these layers. It multiplies bfloat16 where the processor has
instructions for it, else float32. Figures are medians. vlmserve runs without drafts and without prefix caching. Store a
report in `benchmarks/results/engines/MACHINE`.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.command import keep, show_rows
from benchmarks.peers import is_installed, versions
from benchmarks.sizes import SHAPES, SHORT_PROMPT, gguf_file

MAX_CONTEXT: Final = 2048
COLUMNS: Final = (
    "Weights", "Work", "vlmserve, tokens/s", "llama.cpp, tokens/s", "vlmserve / llama.cpp", "Of bandwidth",
    "Of torch.mm",
)  # fmt: skip
Generate = Callable[[Sequence[list[int]], int], object]
"""Computes prompts and this many tokens of each answer, all sequences at once."""


def load_vlmserve(file: Path, streams: int, kernels: str) -> Generate:
    from vlmserve import LLM, SamplingParams

    llm = LLM(
        str(file),
        kv_cache_memory="1GiB",
        max_model_len=MAX_CONTEXT,
        max_num_seqs=streams,
        enable_prefix_caching=False,
        speculation="off",
        kernels=kernels,
        weights_cache_size=0,
    )
    llm.load()

    def generate(prompts: Sequence[list[int]], answer: int) -> object:
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    return generate


class Llama:
    """llama.cpp with one batch for all sequences."""

    def __init__(self, file: Path, streams: int) -> None:
        import llama_cpp

        self._library = llama_cpp
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
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

    def close(self) -> None:
        self._library.llama_free(self._context)
        self._library.llama_model_free(self._model)


class Timer:
    """Times a system with prompts that it has not seen."""

    def __init__(self, generate: Generate, vocabulary: int) -> None:
        self._generate, self._vocabulary, self._starts = generate, vocabulary, itertools.count(1)

    def seconds(self, count: int, length: int, answer: int) -> float:
        """count: sequences. length, answer: tokens of each prompt and answer."""
        prompts = [
            [(start * 7919 + 31 * i) % self._vocabulary for i in range(length)]
            for start in itertools.islice(self._starts, count)
        ]
        started = time.perf_counter()
        self._generate(prompts, answer)
        return time.perf_counter() - started

    def decode_rate(self, count: int, answer: int) -> float:
        """Tokens per second of all sequences together, without their first ones."""
        first = self.seconds(count, SHORT_PROMPT, 1)
        return count * answer / max(1e-6, self.seconds(count, SHORT_PROMPT, 1 + answer) - first)


def mm_rate(shapes: Sequence[tuple[int, int]], rows: int) -> float:
    """FLOP/s of `torch.mm` over linear layers of these shapes."""
    import torch

    from vlmserve.kernels.choice import multiplies_bfloat16

    dtype = torch.bfloat16 if multiplies_bfloat16() else torch.float32
    seconds = 0.0
    for outputs, inputs in shapes:
        x, weight = (torch.randn(count, inputs).to(dtype) for count in (rows, outputs))
        started = time.perf_counter()
        torch.mm(x, weight.T)
        seconds += time.perf_counter() - started
    return flops(shapes, rows) / seconds


def flops(shapes: Sequence[tuple[int, int]], rows: int) -> float:
    """Floating-point operations of linear layers."""
    return 2.0 * rows * sum(outputs * inputs for outputs, inputs in shapes)


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
    import torch

    from vlmserve.tools.bench import memory_bandwidth

    config = SHAPES[options.shape].text
    llama = Llama(file, options.streams) if is_installed("llama-cpp-python") else None
    loaded = [load_vlmserve(file, options.streams, options.kernels), *([llama.generate] if llama else [])]
    timers = [Timer(generate, config["vocab_size"]) for generate in loaded]
    read, shapes = read_of(file)
    read += state_bytes(config)
    rates: dict[str, list[list[float]]] = {}
    shares: dict[str, list[float]] = {}
    one, several, prompt = "decode, 1", f"decode, {options.streams}", f"prompt of {options.prompt}"
    for timer in timers:
        timer.seconds(1, options.prompt, 2)
        timer.seconds(options.streams, SHORT_PROMPT, 3)
    for _ in range(options.turns):
        own = [timer.decode_rate(1, options.answer) for timer in timers]
        rates.setdefault(one, []).append(own)
        shares.setdefault(one, []).append(own[0] * read / memory_bandwidth(torch.device("cpu")))
        own = [timer.decode_rate(options.streams, max(1, options.answer // 2)) for timer in timers]
        rates.setdefault(several, []).append(own)
        own = [options.prompt / timer.seconds(1, options.prompt, 1) for timer in timers]
        rates.setdefault(prompt, []).append(own)
        shares.setdefault(prompt, []).append(own[0] * flops(shapes, 1) / mm_rate(shapes, options.prompt))
    if llama:
        llama.close()
    return [
        [
            kind,
            work,
            *_medians(turns),
            round(statistics.median(shares[one]), 2) if work == one else "",
            round(statistics.median(shares[prompt]), 2) if work == prompt else "",
        ]
        for work, turns in rates.items()
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
    text_shapes = [name for name, shape in SHAPES.items() if not shape.vision]
    parser.add_argument("--shape", choices=text_shapes, default="qwen3.5-2b")
    parser.add_argument("--kinds", nargs="+", default=["BF16", "Q4_K_M"], help="types in GGUF files")
    parser.add_argument("--streams", type=int, default=16, help="sequences at once")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--answer", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--kernels", default="auto", help="vlmserve's instruction set")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="keep files here and use those that are there")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    options = parser.parse_args(arguments)
    rows: list[list[Any]] = []
    with tempfile.TemporaryDirectory(prefix="vlmserve-shares-") as temporary:
        place = options.folder or Path(temporary)
        for kind in options.kinds:
            file = gguf_file(place, options.shape, kind)
            rows += rows_of(file, kind, options)
    report = {
        "title": "Shares of the machine, and llama.cpp",
        "command": " ".join(["python -m benchmarks.shares", *(sys.argv[1:] if arguments is None else arguments)]),
        "model": options.shape,
        "weights": "random",
        "versions": versions("llama-cpp-python"),
        "columns": list(COLUMNS),
        "rows": rows,
    }
    show_rows(report)
    keep(report, options)


if __name__ == "__main__":
    main()
