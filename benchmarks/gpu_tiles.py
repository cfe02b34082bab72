"""Which division of a product is the fastest: a stage of `benchmarks.gpu`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.gpu_stages import Measured, Sizes, layer_products, weight_of
from benchmarks.gpu_timing import copies, per_launch
from vlmserve.kernels.triton.products import PROGRAMS, TritonProduct
from vlmserve.kernels.triton.stored import block_of, unsupported_reason
from vlmserve.kernels.triton.tuned import LARGE_BLOCK, Shape, Tiling

SECONDS = {"cuda": 60, "cpu": 5}
"""After so many, what was not searched yet is left out; a CPU only tries the search itself."""
COMPILING = {"cuda": 16, "cpu": 1}
"""Tilings that are compiled at once; Triton's interpreter has one state for all threads."""
REPEATS = 5
LEAST_GAIN = 1.03
"""A tiling that is faster than the rule's by less is not worth a line."""
SHARED_BYTES = 220 * 1024
"""Of a multiprocessor of an H100 or H200, which the tiles on their way to one program have to fit into."""
Failures = dict[str, str]


def candidates(rule: Tiling, shape: Shape, rows: int) -> Iterator[Tiling]:
    """Tilings for a product of so many rows that give each multiprocessor something to do, and fit into its memory."""
    # Tiles of 4 bits are of blocks, which lie together in memory.
    block = block_of(shape.group, shape.in_features) if shape.bits == 4 else 0
    depths = {block, max(block, LARGE_BLOCK)} if block else {rule.inputs, 2 * rule.inputs}
    widths = (rule.tokens, 2 * rule.tokens) if rows > rule.tokens else (rule.tokens,)
    for outputs, tokens, inputs, splits, stages in itertools.product(
        (32, 64, 128, 256), widths, sorted(depths), (1, 2, 4, 8), sorted({rule.stages, 2, 4})
    ):
        programs = -(-shape.out_features // outputs) * -(-rows // tokens) * splits
        # Parts are added by another launch, which does not pay where there are programs enough.
        enough = programs >= PROGRAMS // 2 and (splits == 1 or programs <= 4 * PROGRAMS)
        for warps in (2, 4, 8):
            tiles = Tiling(outputs, tokens, inputs, splits, warps, stages)
            parts = tiles.parts(shape.bits)
            # Where warps do not divide the inputs, each of a block, they divide outputs.
            divides = tiles.divides_inputs(shape.bits)
            divided = parts > 1 if divides else warps in (outputs // 32, outputs // 16)
            divided = divided and not (block and divides and inputs > block)
            deep = shape.in_features // inputs >= max(parts, 4) * splits
            tile_bytes = inputs * parts * (outputs * shape.bits // 8 + 2 * tokens)
            if enough and divided and deep and (stages - 1) * tile_bytes <= SHARED_BYTES:
                yield tiles


def search(products: Sequence[TritonProduct], x: torch.Tensor, deadline: float) -> dict[str, Any] | None:
    """The fastest of the tilings for some rows which give the rule's results within rounding. None if time ran out
    before any was tried beside the rule's.

    products: copies of one, which calls take turns over, see `copies`.
    """
    first, device = products[0], x.device
    rule = first.tiling(len(x), device)
    expected = first.few(x, tiles=rule)
    others = [tiles for tiles in candidates(rule, first.shape(len(x)), len(x)) if tiles != rule]
    failed: Failures = {}

    def is_right(tiles: Tiling) -> bool:
        """Whether one compiles in time, and its results are those of the rule."""
        if time.perf_counter() > deadline:
            return False
        return _tried(tiles, failed, lambda: _compare(first.few(x, tiles=tiles), expected))

    with ThreadPoolExecutor(COMPILING[device.type]) as pool:
        right = [tiles for tiles, ok in zip(others, pool.map(is_right, others), strict=True) if ok]
    times: dict[Tiling, float] = {}

    def measure(tiles: Tiling) -> None:
        times[tiles] = per_launch([partial(one.few, x, tiles=tiles) for one in products], device, REPEATS).seconds

    measure(rule)
    for tiles in right:
        if time.perf_counter() > deadline:
            break
        _tried(tiles, failed, partial(measure, tiles))
    if others and len(times) + len(failed) == 1:
        return None
    best = min(times, key=times.__getitem__)
    return {
        "best": best,
        "microseconds": times[best] * 1e6,
        "rule": rule,
        "rule_microseconds": times[rule] * 1e6,
        "tried": len(times),
        "untried": 1 + len(others) - len(times) - len(failed),
        "failed": failed,
    }


def _compare(results: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(results, expected, atol=2e-2, rtol=2e-2)


def _tried(tiles: Tiling, failed: Failures, work: Callable[[], object]) -> bool:
    """Whether it works with a tiling; what went wrong goes to `failed`."""
    try:
        work()
    except (RuntimeError, AssertionError, triton.errors.TritonError) as error:
        # Too much shared memory, for one; the others are tried all the same.
        failed[str(tuple(tiles))] = f"{type(error).__name__}: {error}"[:200]
        return False
    return True


def tiles(device: torch.device, sizes: Sizes, folder: Path) -> Measured:
    """The fastest tiling of each of a layer's products, and the lines for `kernels/triton/tuned.py`. What decides
    decodes of one request comes first: few rows, few bits, large weights."""
    deadline = time.perf_counter() + SECONDS[device.type]
    found: dict[Shape, Tiling] = {}
    left_out: list[str] = []
    largest_first = sorted(layer_products(sizes.config).items(), key=lambda item: -item[1][0] * item[1][1])
    for rows, bits in itertools.product(sizes.rows[:1] + sizes.rows[-2:-1], (4, 16, 8)):
        for name, (outputs, inputs, epilogue) in largest_first:
            label = f"{name}, {bits} bits, {rows} rows"
            if time.perf_counter() > deadline:
                left_out.append(label)
                continue
            plain = torch.randn(outputs, inputs, device=device, dtype=sizes.dtype) / inputs**0.5
            weight = weight_of(plain, bits)
            if (reason := unsupported_reason(weight, epilogue.activation)) is not None:
                left_out.append(f"{label}: {reason}")
                continue
            product = TritonProduct(weight, dtype=sizes.dtype, activation=epilogue.activation, gated=epilogue.gated)
            x = torch.randn(rows, inputs, device=device, dtype=sizes.dtype)
            result = search(copies(product, product.num_bytes, device), x, deadline)
            if result is None:
                left_out.append(label)
                continue
            yield label, result
            if result["rule_microseconds"] > LEAST_GAIN * result["microseconds"]:
                found[product.shape(rows)] = result["best"]
                yield "lines", [f"{shape}: {best}," for shape, best in found.items()]
    yield "left_out", left_out
