"""Which division of a product is the fastest: a stage of `benchmarks.gpu`."""

from __future__ import annotations

import itertools
import math
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
from vlmserve.kernels.triton.norm import TritonNorm
from vlmserve.kernels.triton.products import MOST_PLAIN_ROWS, PROGRAMS, TritonLinearKernel
from vlmserve.kernels.triton.stored import block_of, unsupported_reason
from vlmserve.kernels.triton.tuned import LARGE_BLOCK, Shape, Tiling

SECONDS = {"cuda": 60, "cpu": 5}
"""After so many, what was not searched yet is left out; a CPU only tries the search itself."""
COMPILING = {"cuda": 16, "cpu": 1}
"""Tilings that are compiled at once; Triton's interpreter has one state for all threads."""
REPEATS = 5
LEAST_GAIN = 1.03
"""What is faster than what is taken without a line by less is not worth one."""
SHARED_BYTES = 220 * 1024
"""Of a multiprocessor of an H100 or H200, which the tiles on their way to one program have to fit into."""
SUMMED = ("output", "down")
"""Products that residuals are added to."""
Failures = dict[str, str]


def candidates(rule: Tiling, shape: Shape, rows: int) -> Iterator[Tiling]:
    """Tilings for a product of so many rows that give each multiprocessor something to do, and fit into its memory."""
    # Tiles of 4 bits are of blocks, which lie together in memory.
    block = block_of(shape.group, shape.in_features) if shape.bits == 4 else 0
    depths = {block, max(block, LARGE_BLOCK)} if block else {rule.inputs, 2 * rule.inputs}
    widths = (rule.tokens, 2 * rule.tokens) if rows > rule.tokens else (rule.tokens,)
    for outputs, tokens, inputs, splits, stages in itertools.product(
        (16, 32, 64, 128, 256), widths, sorted(depths), (1, 2, 4, 8), sorted({rule.stages, 2, 3, 4, 5})
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
                if shape.bits == 8 and not divides:
                    yield tiles._replace(restarts=True)


def search(
    products: Sequence[TritonLinearKernel], x: torch.Tensor, residual: torch.Tensor | None, deadline: float
) -> dict[str, Any] | None:
    """The fastest of the tilings for some rows which give the rule's results within rounding, beside the library where
    rows are many. None if time ran out before any was tried beside the rule's.

    products: copies of one, which calls take turns over, see `copies`. residual: added to the results; an RMSNorm
    follows on those. The library leaves both to a launch that tilings do without.
    """
    first, device = products[0], x.device
    rule = first.tiling(len(x), device)
    expected = first.few(x, residual, rule)
    others = [tiles for tiles in candidates(rule, first.shape(len(x)), len(x)) if tiles != rule]
    failed: Failures = {}

    def is_right(tiles: Tiling) -> bool:
        """Whether one compiles in time, and its results are those of the rule."""
        if time.perf_counter() > deadline:
            return False
        return _tried(tiles, failed, lambda: _compare(first.few(x, residual, tiles), expected))

    with ThreadPoolExecutor(COMPILING[device.type]) as pool:
        right = [tiles for tiles, ok in zip(others, pool.map(is_right, others), strict=True) if ok]
    times: dict[Tiling, float] = {}

    def measure(tiles: Tiling) -> None:
        calls = [partial(one.few, x, residual, tiles) for one in products]
        times[tiles] = per_launch(calls, device, REPEATS).seconds

    measure(rule)
    library = None
    if len(x) > MOST_PLAIN_ROWS:
        library = per_launch(_by_library(products, x, residual), device, REPEATS).seconds
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
        "library_microseconds": None if library is None else library * 1e6,
        "tried": len(times),
        "untried": 1 + len(others) - len(times) - len(failed),
        "failed": failed,
    }


def _by_library(
    products: Sequence[TritonLinearKernel], x: torch.Tensor, residual: torch.Tensor | None
) -> list[Callable[[], object]]:
    if residual is None:
        return [partial(one.many, x) for one in products]
    norm = TritonNorm(torch.ones_like(residual[0]), None, 1e-5)
    return [partial(_normed_sum, one, x, residual, norm) for one in products]


def _normed_sum(product: TritonLinearKernel, x: torch.Tensor, residual: torch.Tensor, norm: TritonNorm) -> object:
    return norm.of_sum(product.many(x), residual)


def line(product: TritonLinearKernel, rows: int, found: dict[str, Any]) -> tuple[Shape, Tiling | None] | None:
    """What `tuned.py` is to say of a product; None: what is taken without a line is as fast."""
    library, best = found["library_microseconds"] or math.inf, found["microseconds"]
    taken = found["rule_microseconds"] if product.are_few(rows) else library
    if taken <= LEAST_GAIN * min(best, library):
        return None
    return product.shape(rows), None if library < best else found["best"]


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
    decodes of one request comes first, then what decides those of 64; large weights before small ones."""
    deadline = time.perf_counter() + SECONDS[device.type]
    lines: dict[Shape, Tiling | None] = {}
    left_out: list[str] = []
    largest_first = sorted(layer_products(sizes.config).items(), key=lambda item: -item[1][0] * item[1][1])
    few, many = sizes.rows[0], sizes.rows[-2]
    for rows, bits in dict.fromkeys([(few, 4), (few, 16), (many, 16), (many, 4), (few, 8), (many, 8)]):
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
            product = TritonLinearKernel(
                weight, dtype=sizes.dtype, activation=epilogue.activation, gated=epilogue.gated
            )
            x = torch.randn(rows, inputs, device=device, dtype=sizes.dtype)
            residual = torch.randn(rows, outputs, device=device, dtype=sizes.dtype) if name in SUMMED else None
            result = search(copies(product, product.num_bytes, device), x, residual, deadline)
            if result is None:
                left_out.append(label)
                continue
            yield label, result
            if (found := line(product, rows, result)) is not None:
                lines[found[0]] = found[1]
                yield "lines", [f"{shape}: {best}," for shape, best in lines.items()]
    yield "left_out", left_out
