"""Mixtures of experts on a CPU: decode compared with reading memory, prefill with torch's matmuls, interleaved.

    python -m benchmarks.experts
    python -m benchmarks.experts --kernels avx2 --turns 20 --json report.json

Layers have the experts of Qwen3-30B-A3B in 4 bits, router included. Decode runs steps of several rows through several
layers. A step counts the weights of its router and of the experts that its rows choose, each once. "Of
bandwidth" divides the rate of these bytes by the rate at which a sum reads a tensor. Prefill runs the rows of a prompt
through a layer. "Of torch.mm" divides the time of torch's matmuls of the same rows with the same experts' shapes, in
float32, by the time of the layer. Figures are medians of the turns' ratios. Store a report in
`benchmarks/results/kernels/MACHINE`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import keep, show_rows
from benchmarks.delta import Work, ratios
from benchmarks.peers import version
from vlmserve.families.spec import ExpertsSpec
from vlmserve.kernels.cpu_experts import NativeExperts
from vlmserve.kernels.cpu_native import PackedLinear
from vlmserve.kernels.extension import extension
from vlmserve.kernels.operations import RouterWeights
from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.quant.methods.rtn import round_to_nearest

QWEN3_30B_A3B = ExpertsSpec(count=128, top_k=8, inner_size=768)
SIZE = 2048
GROUP_SIZE = 64
NOTES = (
    "Of bandwidth: rate of the weights that a step reads divided by the rate at which a sum reads. "
    "Of torch.mm: time of torch's matmuls of the same shapes divided by the time of the layer. "
    "Medians of interleaved turns."
)
COLUMNS = ("work", "rows", "ms", "of bandwidth", "of torch.mm")


class Layer:
    """The experts of one layer, each with the weights of the same random matrix, in memory of its own."""

    def __init__(self, spec: ExpertsSpec, size: int, bits: int) -> None:
        self.router = torch.randn(spec.count, size) / size**0.5
        up, down = _weight(2 * spec.inner_size, size, bits), _weight(size, spec.inner_size, bits)
        experts = {
            number: (
                PackedLinear(up, dtype=torch.bfloat16, activation="silu", gated=True),
                PackedLinear(down, dtype=torch.bfloat16),
            )
            for number in range(spec.count)
        }
        self.expert_bytes = sum(product.num_bytes for product in experts[0])
        router = PackedLinear(self.router)
        self.router_bytes = router.num_bytes
        self.run = NativeExperts(spec, RouterWeights(router), experts)

    def chosen(self, spec: ExpertsSpec, x: Tensor) -> Tensor:
        """``[rows, top_k]``."""
        return (x.float() @ self.router.T).topk(spec.top_k).indices


def _weight(outputs: int, inputs: int, bits: int) -> QuantizedWeight:
    return round_to_nearest(torch.randn(outputs, inputs) / 40, bits=bits, group_size=GROUP_SIZE, symmetric=False)


def decode_row(layers: Sequence[Layer], spec: ExpertsSpec, rows: int, turns: int) -> list[Any]:
    """A step of several rows, through all layers."""
    x = torch.randn(rows, SIZE).bfloat16()
    moved = sum(layer.router_bytes + layer.expert_bytes * len(layer.chosen(spec, x).unique()) for layer in layers)
    data = torch.ones(moved // 4)
    seconds, [read] = ratios(lambda: [layer.run(x) for layer in layers], [data.sum], turns)
    return ["decode", rows, _rounded(1e3 * seconds / len(layers)), _rounded(moved / data.nbytes * read), None]


def prefill_row(layer: Layer, spec: ExpertsSpec, rows: int, turns: int) -> list[Any]:
    """A prompt through a layer."""
    x = torch.randn(rows, SIZE).bfloat16()
    counts = layer.chosen(spec, x).flatten().bincount(minlength=spec.count).tolist()
    seconds, [relative] = ratios(lambda: layer.run(x), [_matmuls(spec, counts)], turns)
    return ["prefill", rows, _rounded(1e3 * seconds), None, _rounded(relative)]


def _matmuls(spec: ExpertsSpec, counts: Sequence[int]) -> Work:
    """All matmuls of the experts of a prompt, by torch in float32."""
    up, down = torch.randn(SIZE, 2 * spec.inner_size), torch.randn(spec.inner_size, SIZE)
    rows = [(torch.randn(count, SIZE), torch.randn(count, spec.inner_size)) for count in counts if count]
    return lambda: [(x @ up, inner @ down) for x, inner in rows]


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def main(arguments: Sequence[str] | None = None, spec: ExpertsSpec = QWEN3_30B_A3B) -> None:
    """Measure and show a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experts", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--kernels", help="instruction set; default: the best one of this processor")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4, help="bits of experts' weights")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16], help="sequences that decode at once")
    parser.add_argument("--prompts", type=int, nargs="*", default=[64, 256, 1024], help="tokens of prompts")
    parser.add_argument("--layers", type=int, default=3, help="layers that a decode step goes through")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    options = parser.parse_args(arguments)
    native = extension()
    before = native.selected_isa()
    native.select_isa(options.kernels or before)
    with torch.inference_mode():
        layers = [Layer(spec, SIZE, options.bits) for _ in range(options.layers)]
        rows = [decode_row(layers, spec, count, options.turns) for count in options.rows]
        rows += [prefill_row(layers[0], spec, count, options.turns) for count in options.prompts]
    report = {
        "title": f"Experts of Qwen3-30B-A3B's shape in {options.bits} bits",
        "command": " ".join(["python -m benchmarks.experts", *(arguments or sys.argv[1:])]),
        "model": "layers of experts of Qwen3-30B-A3B's shape",
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
