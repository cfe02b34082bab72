"""Turns of a conversation on a GGUF file of a hybrid model: time to the first token, compared with llama.cpp.

    python -m benchmarks.state_peers --json report.json
    python -m benchmarks.state_peers --shape tiny-qwen3.5 --kind Q8_0 --threads 1

Both systems read the same file and run in turn. Each prompt contains the earlier prompt, its answer and a question. In
the second workload, prompts leave out the beginning of earlier answers, as chat templates leave out reasoning. Prompts
and weights are random. Store a report in `benchmarks/results/caches/MACHINE`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import keep, show_rows
from benchmarks.peers import version
from benchmarks.random_models import RANDOM_MODELS
from benchmarks.sizes import SHAPES
from benchmarks.sizes_files import write_checkpoint, write_gguf

FIRST, QUESTION, ANSWER, REASONING = 300, 40, 8, 5
"""Tokens of the first prompt, of each further question, of an answer, and of the reasoning in it."""
MAX_CONTEXT = 2048
COLUMNS = ("Workload", "Tokens of the last prompt", "vlmserve, ms", "llama.cpp, ms", "llama.cpp / vlmserve")
Ask = Callable[[Sequence[int]], tuple[float, list[int]]]
"""Takes a prompt. Returns seconds to the first token, and the answer."""


def vlmserve_asks(file: Path, threads: int) -> Ask:
    from vlmserve import LLM, SamplingParams

    llm = LLM(str(file), kv_cache_memory="1GiB", num_threads=threads, max_model_len=MAX_CONTEXT)
    llm.load()

    def generate(prompt: Sequence[int], count: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        [result] = llm.generate([{"prompt_token_ids": [*prompt]}], params, use_tqdm=False)
        return list(result.outputs[0].token_ids)

    def ask(prompt: Sequence[int]) -> tuple[float, list[int]]:
        started = time.perf_counter()
        generate(prompt, 1)
        return time.perf_counter() - started, generate(prompt, ANSWER)

    return ask


def llama_asks(file: Path, threads: int) -> Ask:
    from llama_cpp import Llama

    llama = Llama(str(file), n_ctx=MAX_CONTEXT, n_threads=threads, n_threads_batch=threads, verbose=False)

    def ask(prompt: Sequence[int]) -> tuple[float, list[int]]:
        started = time.perf_counter()
        tokens = llama.generate([*prompt], temp=0.0, repeat_penalty=1.0)
        answer = [next(tokens)]
        seconds = time.perf_counter() - started
        return seconds, answer + [next(tokens) for _ in range(ANSWER - 1)]

    return ask


def converse(asks: Sequence[Ask], vocabulary: int, turns: int, skipped: int) -> tuple[int, list[float]]:
    """Return the tokens of the last prompt, and each system's median seconds to the first token after the first turn.

    skipped: tokens at the beginning of an answer that later prompts leave out.
    """
    source = random.Random(skipped)

    def text(length: int) -> list[int]:
        return [source.randrange(3, vocabulary) for _ in range(length)]

    prompts = [text(FIRST)] * len(asks)
    seconds: list[list[float]] = [[] for _ in asks]
    for turn in range(turns):
        question = text(QUESTION)
        for number, ask in enumerate(asks):
            taken, answer = ask(prompts[number])
            seconds[number].append(taken)
            if turn + 1 < turns:
                prompts[number] = [*prompts[number], *answer[skipped:], *question]
    return len(prompts[0]), [statistics.median(one[1:]) for one in seconds]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both workloads and show a table."""
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.state_peers", description=description)
    parser.add_argument("--shape", choices=[name for name in SHAPES if "qwen3.5" in name], default="qwen3.5-2b")
    parser.add_argument("--kind", default="Q4_K_M", help="types in the GGUF file (default Q4_K_M)")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    options = parser.parse_args(arguments)
    shape = SHAPES[options.shape]
    vocabulary = shape.text["vocab_size"]
    with tempfile.TemporaryDirectory(prefix="vlmserve-turns-") as place:
        folder = Path(place) / "shapes"
        write_checkpoint(folder, shape.model_class, shape.text, None, RANDOM_MODELS["qwen3-vl"], with_weights=False)
        file = write_gguf(Path(place) / "model.gguf", folder, options.kind)
        asks = [vlmserve_asks(file, options.threads), llama_asks(file, options.threads)]
        rows: list[list[Any]] = []
        for name, skipped in (("answers kept", 0), ("reasoning left out", REASONING)):
            length, seconds = converse(asks, vocabulary, options.turns, skipped)
            own, other = (round(1000 * one, 1) for one in seconds)
            rows.append([name, length, own, other, round(other / own, 2)])
    report = {
        "title": "Turns of a hybrid model, compared with llama.cpp",
        "command": " ".join(["python -m benchmarks.state_peers", *(sys.argv[1:] if arguments is None else arguments)]),
        "model": f"{options.shape}, {options.kind}",
        "weights": "random",
        "versions": {package: version(package) for package in ("vlmserve", "torch", "llama-cpp-python")},
        "columns": list(COLUMNS),
        "rows": rows,
    }
    show_rows(report)
    keep(report, options)


if __name__ == "__main__":
    main()
