"""Which division of a product is the fastest: a stage of `benchmarks.gpu`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.gpu_stages import Sizes, layer_products, per_launch
from vlmserve.kernels.triton.products import TritonProduct
from vlmserve.kernels.triton.tuned import Shape, Tiling
from vlmserve.quant.methods.rtn import round_to_nearest

SECONDS = {"cuda": 100, "cpu": 5}
"""After so many, shapes that were not searched yet are left out; a CPU only tries the search itself."""
LEAST_GAIN = 1.03
"""A tiling that is faster than the rule's by less is not worth a line."""


def candidates(rule: Tiling, in_features: int, *, keeps_inputs: bool) -> Iterator[Tiling]:
    """Tilings near the one of the rule. keeps_inputs: the inputs of a tile are a group."""
    depths = sorted({rule.stages, 3, 5})
    for outputs, splits, stages in itertools.product((32, 64, 128), (1, 2, 4), depths):
        for inputs in (rule.inputs,) if keeps_inputs else (rule.inputs, 2 * rule.inputs):
            if splits == 1 or in_features // inputs >= 4 * splits:
                warps = max(outputs // 32, rule.tokens // 16, 2)
                yield Tiling(outputs, rule.tokens, inputs, splits, warps, stages)


def search(product: TritonProduct, x: torch.Tensor, repeats: int, deadline: float) -> dict[str, Any] | None:
    """The fastest tiling for some rows, which gives the rule's results within rounding; None if time ran out."""
    rule = product.tiling(len(x), x.device)
    expected = product.few(x, tiles=rule)
    times = {rule: per_launch(lambda: product.few(x, tiles=rule), x.device, repeats)}
    failed: dict[str, str] = {}
    for tiles in candidates(rule, x.shape[1], keeps_inputs=product.shape(1).bits == 4):
        if time.perf_counter() > deadline:
            return None
        try:
            torch.testing.assert_close(product.few(x, tiles=tiles), expected, atol=2e-2, rtol=2e-2)
            times[tiles] = per_launch(lambda tiles=tiles: product.few(x, tiles=tiles), x.device, repeats)  # type: ignore[misc]
        except (RuntimeError, AssertionError, triton.errors.TritonError) as error:
            # Too much shared memory, for one; the others are tried all the same.
            failed[str(tuple(tiles))] = f"{type(error).__name__}: {error}"[:200]
    best = min(times, key=times.__getitem__)
    return {
        "best": best,
        "microseconds": times[best] * 1e6,
        "rule": rule,
        "rule_microseconds": times[rule] * 1e6,
        "tried": len(times),
        "failed": failed,
    }


def tiles(device: torch.device, sizes: Sizes, folder: Path) -> dict[str, Any]:
    """The fastest tiling of each of a layer's products, and the lines for `kernels/triton/tuned.py`."""
    deadline = time.perf_counter() + SECONDS[device.type]
    report: dict[str, Any] = {"searched": {}, "left_out": []}
    found: dict[Shape, Tiling] = {}
    for rows, bits in itertools.product(sizes.rows[:1] + sizes.rows[-2:-1], (4, 16, 8)):
        for name, (outputs, inputs, _) in layer_products(sizes.config).items():
            weight = torch.randn(outputs, inputs, device=device, dtype=sizes.dtype) / inputs**0.5
            group = 128 if inputs % 128 == 0 else 32
            few = None if bits == 16 else round_to_nearest(weight, bits=bits, group_size=group, symmetric=False)
            product = TritonProduct(weight if few is None else few, dtype=sizes.dtype)
            x = torch.randn(rows, inputs, device=device, dtype=sizes.dtype)
            result = search(product, x, sizes.repeats, deadline)
            label = f"{name}, {bits} bits, {rows} rows"
            if result is None:
                report["left_out"].append(label)
                continue
            report["searched"][label] = result
            if result["rule_microseconds"] > LEAST_GAIN * result["microseconds"]:
                found[product.shape(rows)] = result["best"]
    report["lines"] = [f"{shape}: {best}," for shape, best in found.items()]
    return report
