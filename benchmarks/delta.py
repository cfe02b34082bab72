"""The gated delta rule on a CPU: decode compared with reading memory, prefill with torch's matmuls, interleaved.

    python -m benchmarks.delta
    python -m benchmarks.delta --kernels avx2 --turns 20 --json report.json

Layers have the heads of Qwen3.5-2B. Decode updates the states of several sequences in as many layers as take 256 MB.
Each state counts as read once and written once. "Of bandwidth" divides the rate of these bytes by the rate at which a
sum reads a tensor. Prefill runs one prompt through a layer. "Of torch.bmm" divides the time of torch's float32 matmuls
of the rule's shapes by the time of the layer, which includes convolution, norm and gate. "Of torch" divides the time of
torch's reference by the time of the layer. Figures are medians of the turns' ratios. Store a report in
`benchmarks/results/kernels/MACHINE`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import keep, show_rows
from benchmarks.peers import version
from vlmserve.kernels.blocks import allocate_states
from vlmserve.kernels.cpu_states import NativeDelta
from vlmserve.kernels.extension import extension
from vlmserve.kernels.states import DeltaWeights, Segments, StateCache, StateRows
from vlmserve.kernels.torch_states import TorchDelta
from vlmserve.layer_specs import DeltaSpec

QWEN35_2B = DeltaSpec(num_key_heads=16, num_value_heads=16, key_size=128, value_size=128, kernel=4)
CHUNK = 64
"""Rows that the rule computes at once."""
NOTES = (
    "Of bandwidth: rate of states, read and written once, divided by the rate at which a sum reads. "
    "Of torch.bmm: time of torch's float32 matmuls of the same shapes divided by the time of the layer. "
    "Of torch: time of the reference divided by the time of the layer. Medians of interleaved turns."
)
COLUMNS = ("work", "rows", "ms", "of bandwidth", "of torch.bmm", "of torch")
Work = Callable[[], object]


def ratios(work: Work, others: Sequence[Work], turns: int, prepare: Work = lambda: None) -> tuple[float, list[float]]:
    """The median seconds of some work, and the median of how long each other takes in the same turn, relative to it.

    prepare: runs before each of them, and its time does not count.
    """
    seconds = []
    for turn in range(turns + 1):
        taken = []
        for one in (work, *others):
            prepare()
            taken.append(_seconds(one))
        if turn:  # the first one is a warm-up
            seconds.append(taken)
    relative = [statistics.median(taken[1 + i] / taken[0] for taken in seconds) for i in range(len(others))]
    return statistics.median(taken[0] for taken in seconds), relative


def decode_row(streams: int, num_bytes: int, turns: int) -> list[Any]:
    """A step of several sequences, in as many layers as have this many bytes of states."""
    kernel, _ = _kernels()
    of_layer = 4 * streams * QWEN35_2B.values * QWEN35_2B.key_size
    caches = [_states(streams) for _ in range(max(1, num_bytes // of_layer))]
    rows = StateRows.of(Segments.of_chunks([(100, 101)] * streams, range(1, 1 + streams)))
    inputs, data = _inputs(streams), torch.ones(num_bytes // 4)
    seconds, [read] = ratios(lambda: [kernel(*inputs, cache, rows) for cache in caches], [data.sum], turns)
    moved = 2 * of_layer * len(caches)
    return ["decode", streams, _rounded(1e3 * seconds / len(caches)), _rounded(moved / data.nbytes * read), None, None]


def prefill_row(rows: int, turns: int) -> list[Any]:
    """A prompt through a layer."""
    kernel, reference = _kernels()
    cache, inputs = _states(1), _inputs(rows)
    segments = StateRows.of(Segments.of_chunks([(0, rows)], [1]))
    seconds, relative = ratios(
        lambda: kernel(*inputs, cache, segments),
        [_matmuls(rows), lambda: reference(*inputs, cache, segments)],
        turns,
    )
    return ["prefill", rows, _rounded(1e3 * seconds), None, *map(_rounded, relative)]


def _matmuls(rows: int) -> Work:
    """All matmuls of the rule for a prompt, by torch in float32: keys and queries with keys and with the state, the
    triangular system and the scores with updates, keys with updates."""
    chunks, key, value = -(-rows // CHUNK), QWEN35_2B.key_size, QWEN35_2B.value_size
    shapes = [(CHUNK, key, CHUNK)] * 2 + [(CHUNK, key, value)] * 2 + [(CHUNK, CHUNK, value)] * 2 + [(key, CHUNK, value)]
    heads = [QWEN35_2B.num_key_heads] * 2 + [QWEN35_2B.num_value_heads] * 5
    factors = [
        (torch.randn(count * chunks, m, k), torch.randn(count * chunks, k, n))
        for count, (m, k, n) in zip(heads, shapes, strict=True)
    ]
    return lambda: [torch.bmm(one, other) for one, other in factors]


def _kernels() -> tuple[NativeDelta, TorchDelta]:
    spec = QWEN35_2B
    weights = DeltaWeights(
        (torch.randn(spec.channels, spec.kernel) / 2).bfloat16(),
        -torch.rand(spec.num_value_heads) * 16,
        torch.randn(spec.num_value_heads) - 3,
        torch.ones(spec.value_size).bfloat16(),
        1e-6,
    )
    return NativeDelta(spec, weights, torch.bfloat16), TorchDelta(spec, weights)


def _states(streams: int) -> StateCache:
    [cache] = allocate_states([QWEN35_2B], 1 + streams, torch.bfloat16, torch.device("cpu"))
    return cache


def _inputs(rows: int) -> tuple[Tensor, Tensor]:
    widths = QWEN35_2B.channels + QWEN35_2B.values, 2 * QWEN35_2B.num_value_heads
    mixed, gates = (torch.randn(rows, width).bfloat16() for width in widths)
    return mixed, gates


def _seconds(work: Work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and show a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.delta", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--kernels", help="instruction set; default: the best one of this processor")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 16], help="sequences that decode at once")
    parser.add_argument("--prompts", type=int, nargs="*", default=[64, 256, 1024], help="tokens of prompts")
    parser.add_argument("--state-bytes", type=int, default=2**28, help="states that a decode step reads")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    options = parser.parse_args(arguments)
    native = extension()
    before = native.selected_isa()
    native.select_isa(options.kernels or before)
    with torch.inference_mode():
        rows = [decode_row(streams, options.state_bytes, options.turns) for streams in options.streams]
        rows += [prefill_row(count, options.turns) for count in options.prompts]
    report = {
        "title": "The gated delta rule of Qwen3.5-2B's shape",
        "command": " ".join(["python -m benchmarks.delta", *(arguments or sys.argv[1:])]),
        "model": "gated delta layers of Qwen3.5-2B's shape",
        "weights": "random",
        "versions": {package: version(package) for package in ("vlmserve", "torch")},
        "columns": list(COLUMNS),
        "rows": [["" if cell is None else cell for cell in row] for row in rows],
        "notes": f"Kernels: {native.selected_isa()}, {torch.get_num_threads()} threads. {NOTES}",
    }
    native.select_isa(before)
    show_rows(report)
    keep(report, options)


if __name__ == "__main__":
    main()
