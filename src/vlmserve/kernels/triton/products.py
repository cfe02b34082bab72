"""Linears: few rows by Triton, many rows by the device's library."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmserve.kernels.adapters import Change, LinearAdapters
from vlmserve.kernels.operations import DeferredNorm, Norm, RoundedRows, Rounding
from vlmserve.kernels.quantized import QuantizedWeight
from vlmserve.kernels.triton import shared_memory
from vlmserve.kernels.triton.adapter_kernels import WORDS
from vlmserve.kernels.triton.adapters import TritonChange, add_adapters, reserved_rank
from vlmserve.kernels.triton.byte_products import rounded_product
from vlmserve.kernels.triton.gated import Layout, finish
from vlmserve.kernels.triton.host_math import cdiv, next_power_of_2
from vlmserve.kernels.triton.norm import TritonNorm
from vlmserve.kernels.triton.product_kernels import add_parts, multiply
from vlmserve.kernels.triton.rounding import round_rows
from vlmserve.kernels.triton.shared_memory import MULTIPROCESSORS, SHARED_BYTES
from vlmserve.kernels.triton.stored import block_of, store
from vlmserve.kernels.triton.tuned import LARGE_BLOCK, TUNED, Shape, Tiling
from vlmserve.kernels.triton.unpacking import has_assembly

MOST_ROWS = 128
"""From this number of rows on, matmuls are compute-bound, and the library is faster."""
MOST_PLAIN_ROWS = 16
"""The same for plain 16-bit weights. On an H200, 32 rows by 6,144 x 4,096 take 16 us (library) and 21 us (`multiply`),
64 rows 16 us and 33 us."""
MOST_WIDE_ROWS = 64
"""The same with enough outputs for large tiles: 64 rows by 28,672 x 4,096, gate and activation included, take 65 us
(library) and 59 us, 128 rows 70 us and 112 us."""
LARGEST_OUTPUTS = 128
LARGE_TILES = ((128, 128), (128, 64), (128, 32), (64, 64))
"""Outputs and maximum rows of tiles for more than 16 rows, best first. Programs read their inputs from the L2 cache: 64
rows are eight times as many bytes as 32 outputs of 4-bit weights, and twice as many as 128 outputs."""
PROGRAMS = 128
"""About the multiprocessors of an H100 or H200 (132). With fewer programs, tiles shrink; with far fewer, inputs are
split."""
ENOUGH_PROGRAMS = 96
"""Sufficient programs with large tiles. One more split costs more than a few idle multiprocessors."""
MOST_WARPS_OF_4_BITS = 2
"""Maximum warps that divide the inputs of 64 outputs. On an H200, one row by 28,672 x 4,096 takes 20 us with 2 warps
and 28 us with 4; with groups of 32, 34 us and 47 us."""
BYTES_ON_THEIR_WAY = 2**15
"""Weights in flight per multiprocessor, about memory bandwidth times latency: 4.3 TB/s times 0.7 to 1 microseconds is
23 to 33 KB for each of 132."""
BYTES_OF_ONE_PROGRAM = 3 * 2**14
"""The same for a single program per multiprocessor, which nothing overlaps. The fastest tilings of plain weights on an
H200 use about this. 4-bit weights use `BYTES_ON_THEIR_WAY`: shared memory limits them, and each stage adds a zero tile
at the end."""
MOST_ON_THEIR_WAY = 11
"""Maximum tiles in flight."""
PARTS_OUTPUTS = 256
"""Outputs that a program of `add_parts` adds."""
EXPANDED_ELEMENTS = 2**28
"""Weights to dequantize at once for many rows: 512 MiB as bfloat16. A layer of a 7B model fits; large output heads take
several rounds."""


def tokens_of_tile(bits: int, rows: int, item_bytes: int) -> int:
    most = 32 if item_bytes == 4 and bits < 16 else 128 if bits == 4 else 64
    return next(size for size in (8, 16, 32, 64, 128) if rows <= size or size == most)


def most_rows(bits: int, out_features: int) -> int:
    if bits == 16:
        return min(MOST_ROWS, MOST_WIDE_ROWS if _is_wide(out_features) else MOST_PLAIN_ROWS)
    return MOST_ROWS


def _is_wide(out_features: int) -> bool:
    return out_features // LARGEST_OUTPUTS >= PROGRAMS


@cache
def tuned_tilings(device: torch.device) -> Mapping[Shape, Tiling | None]:
    return TUNED.get(torch.cuda.get_device_name(device), {}) if device.type == "cuda" else {}


def tiling(
    bits: int,
    group: int,
    out_features: int,
    in_features: int,
    rows: int,
    *,
    item_bytes: int = 2,
    shared: int = SHARED_BYTES,
    multiprocessors: int = MULTIPROCESSORS,
) -> Tiling:
    """Choose a tiling by shape, if none was measured.

    group: inputs that share a scale (4-bit). item_bytes: of an element of x. Each multiprocessor gets several warps and
    enough weights in flight, without spills.
    """
    tokens = tokens_of_tile(bits, rows, item_bytes)
    inputs = {4: group and block_of(group, in_features), 8: 128, 16: 64, 32: 32}[bits]
    sizes = (out_features, in_features, item_bytes, shared)
    large = _large(bits, tokens, inputs, *sizes) if tokens > 16 and item_bytes == 2 else None
    divided = large or _small(bits, tokens, inputs, *sizes)
    programs = cdiv(out_features, divided.outputs) * divided.splits
    alone = programs * cdiv(rows, divided.tokens) <= multiprocessors
    stages = _stages(divided, bits, programs, alone=alone)
    deeper = (divided._replace(stages=count) for count in range(stages, 2, -1))
    if divided.divides_inputs(bits) and alone:
        shared *= 2
    return next((one for one in deeper if one.shared_bytes(bits, item_bytes) <= shared), divided)


def _stages(divided: Tiling, bits: int, programs: int, *, alone: bool) -> int:
    """Count the tile that is computed, one that waits, and tiles in flight.

    Two stages have none in flight, so they need several programs per multiprocessor. alone: at most one program.
    """
    of_program = BYTES_OF_ONE_PROGRAM if alone and bits != 4 else BYTES_ON_THEIR_WAY * PROGRAMS // programs
    tile = divided.outputs * divided.inputs * divided.parts(bits) * bits // 8
    many = programs >= 2 * PROGRAMS
    if not divided.divides_inputs(bits):
        return 1 + min(max(1 if many else 2, cdiv(of_program, tile)), MOST_ON_THEIR_WAY)
    if many and bits != 4:
        return 2
    return 2 + min(max(1, of_program // tile if many else cdiv(of_program, tile)), MOST_ON_THEIR_WAY)


def _large(
    bits: int, tokens: int, inputs: int, out_features: int, in_features: int, item_bytes: int, shared: int
) -> Tiling | None:
    """Large tiles with enough splits for nearly all multiprocessors, if any."""
    inputs = max(inputs, LARGE_BLOCK) if bits == 4 else inputs
    tiles = cdiv(in_features, inputs)
    for outputs, most in LARGE_TILES:
        if most > tokens:
            continue
        programs, splits = cdiv(out_features, outputs), 1
        while programs * splits < ENOUGH_PROGRAMS and tiles // (2 * splits) >= 4:
            splits *= 2
        warps = outputs // 16 if bits == 4 else max(outputs // 32, most // 16)
        large = Tiling(outputs, most, inputs, splits, warps, 2)
        if large.shared_bytes(bits, item_bytes) <= shared and programs * splits >= ENOUGH_PROGRAMS:
            return large
    return None


def _small(
    bits: int, tokens: int, inputs: int, out_features: int, in_features: int, item_bytes: int, shared: int
) -> Tiling:
    """Few enough outputs to occupy each multiprocessor."""
    if bits < 16:
        # registers hold this many sums if warps divide inputs
        tokens = min(tokens, 32)
    largest = LARGEST_OUTPUTS // 2 if tokens <= 16 else LARGEST_OUTPUTS
    if out_features // largest < PROGRAMS:
        largest = 32
    smaller = [Tiling(count, tokens, inputs, 1, 1, 2) for count in (LARGEST_OUTPUTS, 64, 32) if count <= largest]
    divisions = [_divided(tiles, bits, out_features, in_features, item_bytes, shared) for tiles in smaller]
    return next((one for one in divisions if one.shared_bytes(bits, item_bytes) <= shared), divisions[-1])


def _divided(divided: Tiling, bits: int, out_features: int, in_features: int, item_bytes: int, shared: int) -> Tiling:
    outputs = divided.outputs
    programs, tiles = cdiv(out_features, outputs), cdiv(in_features, divided.inputs)
    # with divided inputs, a few multiprocessors read nearly as fast as all
    enough = PROGRAMS // (8 if divided.divides_inputs(bits) else 2)
    splits = 1
    while splits < 8 and programs * splits < enough and tiles // (splits * 2) >= 4:
        splits *= 2
    # separate sums of 4-bit groups need the registers of more warps
    most_tokens = 8 if bits == 4 else 16
    divided = divided._replace(splits=splits, warps=max(outputs // 32, divided.tokens // most_tokens))
    if not divided.divides_inputs(bits):
        return divided
    most_warps = MOST_WARPS_OF_4_BITS if bits == 4 and outputs == 64 else 256 // outputs
    wider = [divided._replace(warps=count) for count in (8, 4, 2, 1) if count <= most_warps]
    needed = [one for one in wider if one.parts(bits) <= cdiv(tiles, splits)] or wider[-1:]
    fitting = [one for one in needed if one.shared_bytes(bits, item_bytes) <= shared] or needed[-1:]
    # whole rounds need no load masks, worth half of the warps
    return next((one for one in fitting[:2] if tiles % (splits * one.parts(bits)) == 0), fitting[0])


def pairs(out_features: int, device: torch.device) -> Tensor:
    return torch.arange(out_features, device=device).view(2, -1).T.flatten()


class TritonLinearKernel:
    """Multiplies few rows in one launch, with epilogue and residual.

    - Split inputs need a second launch.
    - Adapters need one more launch for their `down` matmul; the launch that adds splits applies them.
    - More than `most_rows` rows use the device's library, after a launch that dequantizes.
    - 8-bit weights with 8-bit inputs use an integer matmul.

    Class attributes for measurements: defers_norms: an RMSNorm after few rows needs no launch. fuses: norms and
    activations round inputs.
    """

    change_words: int = WORDS.value
    defers_norms: ClassVar[bool] = True
    fuses: ClassVar[bool] = True

    def __init__(
        self,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype,
        activation: str | None = None,
        gated: bool = False,
        float_output: bool = False,
    ) -> None:
        """dtype: of inputs, and of results unless `float_output`. gated: see `Epilogue`."""
        self._out_features, self._in_features = weight.shape
        if gated:
            order = pairs(self._out_features, _device(weight))
            weight = weight[order]
            bias = None if bias is None else bias[order]
        self.stored, self._bias = store(weight), bias
        self.dtype, self.activation, self.gated = dtype, activation, gated
        self._output_dtype = torch.float32 if float_output else dtype
        self._assembly = has_assembly(self.stored.values.device)
        self._groups = self.stored.block // self.stored.group if self.stored.bits == 4 else 1
        quantized = weight if isinstance(weight, QuantizedWeight) else None
        self._rounds_inputs = quantized is not None and (quantized.bits, quantized.input_bits) == (8, 8)
        self._width = self._out_features // 2 if gated else self._out_features
        self._tilings: dict[tuple[int, torch.device], Tiling] = {}
        self._few: dict[int, bool] = {}

    @property
    def num_bytes(self) -> int:
        return self.stored.num_bytes

    def pack_change(self, change: Change) -> TritonChange:
        order = pairs(self._out_features, self.stored.values.device) if self.gated else None
        return TritonChange(change, order, self._out_features, self._in_features)

    def reserved_rank(self, parts: int, rank: int) -> int:
        return reserved_rank(parts, rank)

    def rows(self, indices: Tensor) -> Tensor:
        if self.stored.scales is None:
            return F.embedding(indices, self.stored.values)
        return self.stored.rows(indices, self.dtype)

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        adapters: LinearAdapters | None = None,
    ) -> Tensor:
        flat = x.reshape(-1, self._in_features)
        if flat.stride(1) != 1:
            flat = flat.contiguous()
        added = None if residual is None else residual.reshape(-1, self._width)
        if adapters is not None and (adapters.rank is None or not adapters.active):
            adapters = None
        if self.are_few(len(flat)):
            result = self.few(flat, added, adapters=adapters)
        else:
            result = self.many(flat, added, adapters)
        return result.view(*x.shape[:-1], self._width)

    def deferring(self, x: Tensor, residual: Tensor, norm: Norm) -> DeferredNorm | None:
        """float16 could overflow before the norm's scaling."""
        alone = self.activation is None and not self.gated and self.dtype == self._output_dtype != torch.float16
        few = self.defers_norms and self.are_few(len(x)) and len(x) > 0
        if not (alone and few and isinstance(norm, TritonNorm) and norm.only_scales):
            return None
        tiles = self.tiling(len(x), x.device)
        programs_of_row = cdiv(self._out_features, PARTS_OUTPUTS if tiles.splits > 1 else tiles.outputs)
        squares = torch.empty((len(x), programs_of_row), dtype=torch.float32, device=x.device)
        weighted = torch.empty((len(x), self._width), dtype=self.dtype, device=x.device)
        rows = self.few(x, residual, tiles, next_norm=(norm.weight, weighted, squares))
        return DeferredNorm(rows, weighted, squares, norm, norm.eps)

    def completes(self, rows: int) -> bool:
        return self.are_few(rows)

    def complete(self, x: DeferredNorm) -> Tensor:
        return self.few(x)

    def are_few(self, rows: int) -> bool:
        if rows > MOST_ROWS:
            return False
        if rows not in self._few:
            shape = self.shape(rows)
            measured = self._measured
            if shape in measured and rows <= shape.tokens:
                self._few[rows] = measured[shape] is not None
            else:
                self._few[rows] = rows <= most_rows(shape.bits, shape.out_features)
        return self._few[rows]

    @property
    def _measured(self) -> Mapping[Shape, Tiling | None]:
        return tuned_tilings(self.stored.values.device) if self.dtype.itemsize == 2 else {}

    def shape(self, rows: int) -> Shape:
        stored = self.stored
        tokens = tokens_of_tile(stored.bits, rows, self.dtype.itemsize)
        return Shape(stored.bits, stored.group, self._out_features, self._in_features, tokens)

    def tiling(self, rows: int, device: torch.device) -> Tiling:
        if (rows, device) not in self._tilings:
            shape = self.shape(rows)
            item_bytes = self.dtype.itemsize
            self._tilings[rows, device] = self._measured.get(shape) or tiling(
                *shape[:4],
                rows,
                item_bytes=item_bytes,
                shared=shared_memory.shared_bytes(device),
                multiprocessors=shared_memory.multiprocessors(device),
            )
        return self._tilings[rows, device]

    def few(
        self,
        x: Tensor | DeferredNorm,
        residual: Tensor | None = None,
        tiles: Tiling | None = None,
        adapters: LinearAdapters | None = None,
        next_norm: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor:
        """tiles: overrides the tiling. adapters: at least one packed. next_norm: next norm's weights and buffers."""
        deferred, x = (x, x.weighted) if isinstance(x, DeferredNorm) else (None, x)
        rows = len(x)
        out = torch.empty((rows, self._width), dtype=self._output_dtype, device=x.device)
        if not rows:
            return out
        stored = self.stored
        tiles = tiles or self.tiling(rows, x.device)
        parts = out
        keeps_sums = tiles.splits > 1 or adapters is not None
        if keeps_sums:
            parts = torch.empty((tiles.splits, rows, self._out_features), dtype=torch.float32, device=x.device)
        bias = out if self._bias is None else self._bias
        added = out if residual is None else residual.contiguous()
        following = (out, out, out) if next_norm is None else next_norm
        epilogue = {
            "ACTIVATION": self.activation or "",
            "GATED": self.gated,
            "HAS_BIAS": self._bias is not None,
            "HAS_RESIDUAL": residual is not None,
            "HAS_NORM": next_norm is not None,
        }
        columns, side_by_side = cdiv(self._out_features, tiles.outputs), tiles.parts(stored.bits)
        whole_rounds = tiles.inputs * side_by_side * tiles.splits
        multiply[(columns, cdiv(rows, tiles.tokens), tiles.splits)](
            x,
            stored.values,
            stored.values if stored.scales is None else stored.scales,
            stored.values if stored.minimums is None else stored.minimums,
            bias,
            added,
            out,
            parts,
            out if deferred is None else deferred.squares,
            *following,
            rows,
            x.stride(0),
            self._in_features,
            self._out_features,
            0 if deferred is None else deferred.squares.shape[1],
            0.0 if deferred is None else deferred.eps,
            OUTPUTS=tiles.outputs,
            TOKENS=tiles.tokens,
            INPUTS=tiles.inputs,
            BITS=stored.bits,
            BLOCK=stored.block,
            GROUPS=self._groups,
            PARTS=side_by_side,
            SPLITS=tiles.splits,
            KEEPS_SUMS=keeps_sums,
            STAGES=tiles.stages,
            RESTARTS=tiles.restarts and stored.bits == 8,
            EVEN=self._in_features % (tiles.inputs if side_by_side == 1 else whole_rounds) == 0,
            COLUMNS=0 if deferred is None else next_power_of_2(deferred.squares.shape[1]),
            ASSEMBLY=self._assembly,
            num_warps=tiles.warps,
            **epilogue,
        )
        if adapters is not None:
            self._add_adapters(x, parts, out, adapters, residual)
        elif keeps_sums:
            add_parts[(cdiv(self._out_features, PARTS_OUTPUTS), rows)](
                parts, bias, added, out, *following, rows, self._out_features, OUTPUTS=PARTS_OUTPUTS,
                SPLITS=tiles.splits, num_warps=4, **epilogue,
            )  # fmt: skip
        return out

    def many(self, x: Tensor, residual: Tensor | None = None, adapters: LinearAdapters | None = None) -> Tensor:
        if residual is not None and adapters is None and self._library_adds(residual):
            return self._expanded(x, residual)
        output = self._of_rounded(round_rows(x, "int8")) if self._rounds_inputs else self._expanded(x)
        if adapters is None:
            return self._finish(output, residual)
        out = torch.empty((len(x), self._width), dtype=self._output_dtype, device=x.device)
        return self._add_adapters(x, output, out, adapters, residual)

    def rounding(self, rows: int) -> Rounding | None:
        return "int8" if self._rounds_inputs and self.fuses and not self.are_few(rows) else None

    def of_rounded(self, x: RoundedRows, residual: Tensor | None = None) -> Tensor:
        return self._finish(self._of_rounded(x), None if residual is None else residual.reshape(-1, self._width))

    def rounded(self, x: Tensor | RoundedRows, rounding: Rounding) -> RoundedRows | None:
        if isinstance(x, Tensor):
            if self.are_few(len(x)) or self._output_dtype != self.dtype:
                return None
            x = round_rows(x, "int8") if self._rounds_inputs else x
        output = self._expanded(x) if isinstance(x, Tensor) else self._of_rounded(x)
        return round_rows(output, rounding, self.activation, self._layout)

    def _of_rounded(self, x: RoundedRows) -> Tensor:
        assert self.stored.scales is not None
        return rounded_product(x, self.stored.values, self.stored.scales, self._bias, self.dtype)

    def _finish(self, output: Tensor, residual: Tensor | None) -> Tensor:
        if self.activation is None and residual is None and not self.gated:
            return output.to(self._output_dtype)
        return finish(output, self.activation, layout=self._layout, residual=residual, dtype=self._output_dtype)

    @property
    def _layout(self) -> Layout:
        return "pairs" if self.gated else ""

    def _library_adds(self, residual: Tensor) -> bool:
        """The library has room for one addend, which may be the bias."""
        plain = self.activation is None and self._bias is None and not self.gated and not self._rounds_inputs
        return plain and residual.dtype == self.dtype == self._output_dtype

    def _expanded(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Multiply by weights dequantized in parts. Without a bias, `residual` is added before rounding."""
        if self.stored.scales is None:
            return _product(x, self.stored.values, self._bias, residual)
        step = max(1, EXPANDED_ELEMENTS // self._in_features)
        parts = []
        for start in range(0, self._out_features, step):
            outputs = slice(start, start + step)
            weight = self.stored.expanded(outputs, self.dtype, assembly=self._assembly)
            bias = None if self._bias is None else self._bias[outputs]
            parts.append(_product(x, weight, bias, None if residual is None else residual[:, outputs]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def _add_adapters(
        self, x: Tensor, sums: Tensor, out: Tensor, adapters: LinearAdapters, residual: Tensor | None
    ) -> Tensor:
        added = None if residual is None else residual.contiguous()
        add_adapters(x, sums, out, adapters, self._bias, added, self.activation, gated=self.gated)
        return out


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias) if residual is None else torch.addmm(residual, x, weight.t())


def _device(weight: Tensor | QuantizedWeight) -> torch.device:
    return weight.device if isinstance(weight, Tensor) else weight.values.device
