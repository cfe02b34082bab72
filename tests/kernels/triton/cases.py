"""Kernels as large models launch them: types, constants, tiles."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl

from vlmserve.kernels.triton import (
    adapter_kernels,
    attention_kernels,
    byte_products,
    delta_chunks,
    encoder,
    expanding,
    expert_kernels,
    experts,
    gated,
    norm,
    product_kernels,
    rope,
    rounding,
    sampling,
    sampling_kernels,
    states,
)
from vlmserve.kernels.triton.adapters import OUTPUTS, RANKS, STAGES, division
from vlmserve.kernels.triton.attention import STAGES as ATTENTION_STAGES
from vlmserve.kernels.triton.attention import tile
from vlmserve.kernels.triton.products import MOST_ROWS, PARTS_OUTPUTS, tiling
from vlmserve.kernels.triton.stored import block_of
from vlmserve.layer_specs import AttentionSpec


class Case(NamedTuple):
    """A kernel and how it is called. types: of arguments that are no constants. weights: of one round of the innermost
    loop, or of a program that has none. tiles_bytes: of shared memory that its tiling
    counts with, and with one tile more."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    warps: int
    stages: int = 3
    weights: int = 0
    tiles_bytes: Sequence[int] = ()


STORED = {"int8": "*i8", "fp8": "*u8"}
"""Keys and values of 8 bits."""


def product_cases() -> Iterator[Case]:
    pointers = {
        "x_ptr": "*bf16",
        "scales_ptr": "*fp16",
        "minimums_ptr": "*fp16",
        "bias_ptr": "*bf16",
        "residual_ptr": "*bf16",
        "out_ptr": "*bf16",
        "norm_ptr": "*bf16",
        "weighted_ptr": "*bf16",
        **dict.fromkeys(("sums_ptr", "x_squares_ptr", "squares_ptr"), "*fp32"),
    }
    numbers = dict.fromkeys(("rows", "stride_x", "in_features", "out_features", "x_columns"), "i32")
    # Two of Mistral-7B's products: attention's outputs, gates and ups, with the norm between them. float32 fills shared
    # memory most. Each of them differs by what follows it alone, whatever the bits.
    by_4_bits = itertools.product(((4, "*u8"),), (1, 64), (4096, 28672), ("*bf16",), (128,))
    by_more = [((8, "*u8"), 1, 28672), ((8, "*u8"), 64, 4096), ((16, "*bf16"), 1, 4096), ((16, "*bf16"), 64, 28672)]
    kinds = itertools.chain(by_4_bits, ((*one, "*bf16", 128) for one in by_more))
    in_float32 = itertools.product(((4, "*u8"), (8, "*u8")), (1,), (4096,), ("*fp32",), (128,))
    small_groups = itertools.product(((4, "*u8"),), (1, 64), (28672,), ("*bf16",), (32,))
    for (bits, weight), rows, out_features, x, group in itertools.chain(kinds, in_float32, small_groups):
        item_bytes = 2 if x == "*bf16" else 4
        tiles = tiling(bits, group, out_features, 4096, rows, item_bytes=item_bytes)
        gates = out_features == 28672
        further = f" in groups of {group}" if group < 128 else " in float32" if item_bytes == 4 else ""
        product = Case(
            f"{rows} x 4096 x {out_features} of {bits} bits{further}",
            product_kernels.multiply,
            {
                **pointers, **dict.fromkeys(("x_ptr", "bias_ptr", "residual_ptr", "out_ptr"), x), "weight_ptr": weight,
                **numbers, "eps": "fp32", "scales_ptr": "*fp16" if bits == 4 else "*fp32",
            },
            {
                "OUTPUTS": tiles.outputs, "TOKENS": tiles.tokens, "INPUTS": tiles.inputs, "BITS": bits,
                "BLOCK": block_of(group, 4096) if bits == 4 else 0,
                "GROUPS": block_of(group, 4096) // group if bits == 4 else 1,
                "PARTS": tiles.parts(bits), "SPLITS": tiles.splits, "KEEPS_SUMS": tiles.splits > 1,
                "STAGES": tiles.stages, "EVEN": True, "RESTARTS": False,
                "ACTIVATION": "silu" if gates else "", "GATED": gates,
                "HAS_BIAS": False, "HAS_RESIDUAL": not gates, "HAS_NORM": not gates and (rows == 1 or bits < 16),
                "COLUMNS": 128 if gates else 0, "ASSEMBLY": True,
            },
            warps=tiles.warps,
            weights=tiles.outputs * tiles.inputs * tiles.parts(bits) if item_bytes == 2 else 0,
            tiles_bytes=[tiles._replace(stages=tiles.stages + more).shared_bytes(bits, item_bytes) for more in (0, 1)],
        )  # fmt: skip
        yield product
        if (rows, bits, out_features) == (64, 8, 4096):
            constants = {**product.constants, "RESTARTS": True}
            # With as few warps, sums do not fit into registers.
            yield product._replace(name=f"restarting {product.name}", constants=constants, warps=2 * tiles.warps)
    yield Case(
        "sum of parts",
        product_kernels.add_parts,
        {**pointers, **numbers},
        {
            "OUTPUTS": PARTS_OUTPUTS, "SPLITS": 4, "ACTIVATION": "", "GATED": False, "HAS_BIAS": False,
            "HAS_RESIDUAL": True, "HAS_NORM": True,
        },
        warps=4,
    )  # fmt: skip


def expert_cases() -> Iterator[Case]:
    """Qwen3-30B-A3B's experts."""
    pointers = {
        **dict.fromkeys(("x_ptr", "results_ptr", "residual_ptr", "out_ptr"), "*bf16"),
        **dict.fromkeys(("logits_ptr", "correction_ptr", "factors_ptr", "weights_ptr"), "*fp32"),
        **dict.fromkeys(("chosen_ptr", "counts_ptr", "order_ptr", "tiles_ptr"), "*i32"),
        "table_ptr": "*i64",
        "scale": "fp32",
        **dict.fromkeys(("rows", "count", "tiles", "stride_x", "in_features", "out_features", "size"), "i32"),
    }
    router = {"COUNT": 128, "BLOCK": 128, "TOP_K": 8, "TOP_BLOCK": 8, "SIGMOIDS": False, "RENORMALIZED": True}
    router |= {"HAS_CORRECTION": True, "HAS_FACTORS": True}
    yield Case("choice of experts", expert_kernels.choose_experts, pointers, router, 1)
    yield Case("counting of choices", expert_kernels.count_rows, pointers, {"BLOCK": experts.CHOICES}, 4)
    sorting = {"COUNT": 128, "EXPERTS": 128, "TOKENS": 16, "BLOCK": experts.CHOICES}
    yield Case("sorting of choices", expert_kernels.sort_rows, pointers, sorting, 4)
    weighing = {"TOP_K": 8, "BLOCK": experts.COLUMNS, "HAS_RESIDUAL": True}
    yield Case("weighing of experts", expert_kernels.weigh_experts, pointers, weighing, 4)
    for bits, group, rows in ((4, 128, 1), (4, 32, 64), (8, 0, 1), (16, 0, 64)):
        tiles, block = experts.tile(bits, group, 2048, rows, 2), block_of(group, 2048) if bits == 4 else 0
        constants = {
            "FIRST_WORD": 0, "TOP_K": 8, "GATHERS": True, "OUTPUTS": tiles.outputs, "TOKENS": tiles.tokens,
            "INPUTS": tiles.inputs, "BITS": bits, "BLOCK": block, "GROUPS": block // group if bits == 4 else 1,
            "STAGES": tiles.stages, "EVEN": True, "ASSEMBLY": True, "ACTIVATION": "silu", "GATED": True,
        }  # fmt: skip
        name = f"product of experts, {rows} rows of {bits} bits{f' in groups of {group}' if bits == 4 else ''}"
        yield Case(name, expert_kernels.multiply_by_expert, pointers, constants, tiles.warps)


def expanding_cases() -> Iterator[Case]:
    types = {"packed_ptr": "*u8", "scales_ptr": "*fp16", "minimums_ptr": "*fp16", "out_ptr": "*bf16"}
    types |= dict.fromkeys(("out_features", "in_features", "blocks", "stride"), "i32")
    tile = {"OUTPUTS": expanding.OUTPUTS, "ASSEMBLY": True}
    weights = expanding.OUTPUTS * expanding.BYTES
    for group in (32, 128):
        block = block_of(group, 4096)
        constants = {**tile, "BLOCK": block, "GROUPS": block // group, "BLOCKS": 2 * expanding.BYTES // block}
        name = f"expansion of 4 bits in groups of {group}"
        yield Case(name, expanding.expand_groups, types, constants, 4, weights=2 * weights)
    constants = {**tile, "INPUTS": expanding.BYTES}
    types["scales_ptr"] = "*fp32"
    yield Case("expansion of 8 bits", expanding.expand_rows, types, constants, 4, weights=weights)


def adapter_cases() -> Iterator[Case]:
    """Adapters of Mistral-7B's gates and ups, and for many rows everything that there may be."""
    types = {
        **dict.fromkeys(("x_ptr", "bias_ptr", "residual_ptr", "out_ptr"), "*bf16"),
        **dict.fromkeys(("inner_ptr", "sums_ptr", "scalings_ptr"), "*fp32"),
        "table_ptr": "*i64",
        "slots_ptr": "*i32",
        **dict.fromkeys(("rows", "stride_x", "in_features", "out_features", "rank", "slot_stride", "columns"), "i32"),
    }
    for rows in (1, 1000):
        many, (tokens, inputs, splits) = rows > MOST_ROWS, division(rows, 4096, torch.bfloat16)
        shrinking = {
            "TOKENS": tokens, "INPUTS": inputs, "SPLITS": splits, "STAGES": STAGES, "EVEN": True, "SCALED": many,
            "RANKS": RANKS,
        }  # fmt: skip
        yield Case(f"first factors of {rows}", adapter_kernels.shrink, types, shrinking, max(2, tokens // 8))
        adding = {
            "OUTPUTS": OUTPUTS, "TOKENS": tokens, "SPLITS": 1, "INNER_SPLITS": splits, "DTYPE": tl.bfloat16,
            "RANKS": RANKS, "BIASED": many, "ACTIVATION": "silu", "GATED": True, "HAS_BIAS": False,
            "HAS_RESIDUAL": many,
        }  # fmt: skip
        sums = {"sums_ptr": "*bf16"} if many else {}
        warps = max(4, tokens // 4)
        yield Case(f"second factors of {rows}", adapter_kernels.add_changes, {**types, **sums}, adding, warps)


def attention_cases() -> Iterator[Case]:
    types = {
        **dict.fromkeys(("query_ptr", "keys_ptr", "values_ptr", "out_ptr"), "*bf16"),
        **dict.fromkeys(("scales_ptr", "sinks_ptr", "sums_ptr", "largest_ptr", "cos_ptr", "sin_ptr"), "*fp32"),
        **dict.fromkeys(("query_norm_ptr", "key_norm_ptr"), "*bf16"),
        **dict.fromkeys(("positions_ptr", "slots_ptr"), "*i64"),
        **dict.fromkeys(("tables_ptr", "starts_ptr", "contexts_ptr", "reach_ptr", "decodes_ptr"), "*i32"),
        **dict.fromkeys(("items_ptr", "joins_ptr"), "*i32"),
        **dict.fromkeys(("num_decodes", "num_sequences", "num_items", "num_joins"), "i32"),
        **dict.fromkeys(("decodes", "size", "most_items", "most_joins"), "i32"),
        **dict.fromkeys(("table_stride", "query_stride", "column", "column_stride"), "i32"),
        **dict.fromkeys(("scale", "soft_cap", "eps"), "fp32"),
    }
    plain = {"WINDOW": 0, "QUANTIZED": ""} | dict.fromkeys(("CAPPED", "SINKS", "REACH", "SPLIT_CHUNKS", "MIXED"), False)
    everything = {"WINDOW": 1024, "CAPPED": True, "SINKS": True, "REACH": True}
    split = {"SPLIT_CHUNKS": True, "MIXED": True}
    beside = {**split, "ITEMS": True}
    for head, chunks, further in (
        (128, False, {}),
        (128, False, {"QUANTIZED": "int8"}),
        (128, False, {"QUANTIZED": "fp8"}),
        (128, True, everything),
        (128, True, beside),
        (64, False, {**everything, "REACH": False}),
        (256, True, {}),
        (512, False, {}),
        (512, True, {}),
    ):
        tiles = tile(AttentionSpec(32, 8, head, 1.0), chunks=chunks, quantized="QUANTIZED" in further)
        stored = dict.fromkeys(("keys_ptr", "values_ptr"), STORED.get(further.get("QUANTIZED", ""), "*bf16"))
        kind = "".join(f", {value if name == 'QUANTIZED' else name.lower()}" for name, value in further.items())
        yield Case(
            f"attention of {'chunks' if chunks else 'decodes'}, heads of {head}{kind}",
            attention_kernels.attend_rows,
            {**types, **stored},
            {
                "HEADS": 32, "KV_HEADS": 8, "HEAD": head, "HEAD_BLOCK": head, "BLOCK_SIZE": 16,
                "ROWS": tiles.rows, "KEYS": tiles.keys, "STAGES": ATTENTION_STAGES, "ASSEMBLY": True,
                "ROTATED": 0 if chunks else head, "CHUNKS": chunks,
                **dict.fromkeys(("ITEMS", "WRITES", "HAS_POSITIONS", "HAS_NORMS"), not chunks), **plain, **further,
            },
            warps=tiles.warps,
        )  # fmt: skip
    constants = {"HEADS": 32, "HEAD": 128, "HEAD_BLOCK": 128, "WINDOW": 0, "SINKS": False, **split}
    yield Case("combining beside chunks", attention_kernels.combine, types, {**constants, "JOINS": True}, 2)
    alone = dict.fromkeys(split, False)
    yield Case("combining of decodes", attention_kernels.combine, types, {**constants, **alone, "JOINS": True}, 2)
    dividing = {"DECODES": 256, "WINDOW": 1024}
    yield Case("dividing of decodes", attention_kernels.divide_decodes, types, dividing, 1)


def tower_cases() -> Iterator[Case]:
    types = {"qkv_ptr": "*bf16", "out_ptr": "*bf16", "blocks_ptr": "*i32", "scale": "fp32", "stride": "i32"}
    types |= dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32")
    # Qwen2.5-VL's heads, in windows and without, the latter on GPUs of much shared memory and of less.
    for rows, shared in ((64, 0), (128, 0), (128, encoder.LARGE_BYTES)):
        tiles = encoder.tile(rows, torch.bfloat16, shared)
        constants = {"HEADS": 16, "HEAD": 80, "HEAD_BLOCK": 128, "ROWS": rows, "KEYS": tiles.keys}
        yield Case(
            f"attention of images, {rows} rows by {tiles.keys} keys", encoder.attend_ranges, types,
            {**constants, "STAGES": tiles.stages}, tiles.warps,
        )  # fmt: skip
    constants = {"HEADS": 32, "HALF": 40, "HEADS_BLOCK": 32, "HALF_BLOCK": 64}
    yield Case("rotation of patches", encoder.rotate_rows, types, constants, 4)


def byte_cases() -> Iterator[Case]:
    pointers = {"x_ptr": "*i8", "x_scales_ptr": "*fp32", "weight_ptr": "*u8", "scales_ptr": "*fp32"}
    pointers |= {"bias_ptr": "*bf16", "out_ptr": "*bf16"}
    numbers = dict.fromkeys(("rows", "width", "out_features", "groups", "stride"), "i32")
    constants = {"ROWS": 64, "OUTPUTS": 128, "GROUP": 128, "STAGES": 3, "HAS_BIAS": False}
    yield Case("product of bytes", byte_products.multiply_bytes, {**pointers, **numbers}, constants, 4)
    rows = {"x_ptr": "*bf16", "scales_ptr": "*fp32", **numbers}
    for name, kernel, values, layout, constants, warps in (
        ("inputs", rounding.round_to_int8, "*i8", "", {"COUNT": rounding.GROUPS_AT_ONCE}, 4),
        ("gates", rounding.round_to_int8, "*i8", "pairs", {"COUNT": rounding.GROUPS_AT_ONCE}, 4),
        ("inputs", rounding.round_to_float8, "*u8", "", {"BLOCK": rounding.BLOCK}, 8),
        ("gates", rounding.round_to_float8, "*u8", "halves", {"BLOCK": rounding.BLOCK}, 8),
    ):
        constants = {"ACTIVATION": "silu" if layout else "", "LAYOUT": layout, **constants}
        kind = "float8" if values == "*u8" else "int8"
        yield Case(f"rounding of {name} to {kind}", kernel, {**rows, "values_ptr": values}, constants, warps)


def other_cases() -> Iterator[Case]:
    half = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "residual_ptr", "out_ptr", "sums_ptr"), "*bf16")
    numbers = dict.fromkeys(("heads", "stride_token", "stride_head", "width"), "i32")
    constants = {"SIZE": 4096, "BLOCK": 4096, "HAS_RESIDUAL": True, "HAS_NORM": True, "HAS_BIAS": False}
    constants["ROUNDS"] = ""
    first = dict.fromkeys(("first_weight_ptr", "first_bias_ptr"), "*bf16")
    rows = {**half, **first, **numbers, "eps": "fp32", "first_eps": "fp32", "scales_ptr": "*fp32"}
    for has_first in (False, True):
        either = {**constants, "HAS_FIRST": has_first, "FIRST_HAS_BIAS": False}
        yield Case(f"norm of a sum{' of norms' if has_first else ''}", norm.norm_rows, rows, either, 8)
    for rounds, values in (("int8", "*i8"), ("float8", "*u8")):
        either = {**constants, "HAS_FIRST": False, "FIRST_HAS_BIAS": False, "ROUNDS": rounds}
        yield Case(f"norm of a sum, rounded to {rounds}", norm.norm_rows, {**rows, "out_ptr": values}, either, 8)
    constants = {"ACTIVATION": "silu", "LAYOUT": "pairs", "HAS_RESIDUAL": False, "BLOCK": 1024}
    yield Case("gates", gated.activate_rows, {**half, **numbers}, constants, 4)
    pointers = {
        **dict.fromkeys(("qkv_ptr", "query_ptr", "keys_ptr", "values_ptr", "query_norm_ptr", "key_norm_ptr"), "*bf16"),
        **dict.fromkeys(("cos_ptr", "sin_ptr", "scales_ptr"), "*fp32"),
        **dict.fromkeys(("positions_ptr", "slots_ptr"), "*i64"),
        "stride": "i32",
        "eps": "fp32",
    }
    shape = {
        "HEADS": 32,
        "KV_HEADS": 8,
        "HEAD": 128,
        "ROTATED": 128,
        "BLOCK_SIZE": 16,
        "HEADS_BLOCK": 32,
        "KV_BLOCK": 8,
    }
    for quantized in ("", "int8", "fp8"):
        stored = dict.fromkeys(("keys_ptr", "values_ptr"), STORED.get(quantized, "*bf16"))
        constants = {**shape, "HEAD_BLOCK": 128, "HAS_POSITIONS": True, "HAS_NORMS": True, "QUANTIZED": quantized}
        name = "rotary positions" + (f" in 8 bits, {quantized}" if quantized else "")
        yield Case(name, rope.rotate_and_write, {**pointers, **stored}, constants, 4)
    drawing = {
        **dict.fromkeys(("logits_ptr", "options_ptr", "places_ptr", "maxima_ptr"), "*fp32"),
        **dict.fromkeys(("tokens_ptr", "groups_ptr"), "*i32"),
        "numbers_ptr": "*fp64",
    }
    sizes = dict.fromkeys(("vocabulary", "stride", "count"), "i32")
    constants = {"BLOCK": sampling.BLOCK, "GROUP": sampling.GROUP}
    yield Case("drawing", sampling_kernels.draw_rows, {**drawing, **sizes}, constants, sampling.WARPS)
    changing = {"logits_ptr": "*fp32", "entries_ptr": "*i64", "changes_ptr": "*fp32", **sizes}
    yield Case("penalties", sampling_kernels.change_logits, changing, {"BLOCK": 256}, 4)


def state_cases() -> Iterator[Case]:
    """Qwen3.5-4B's delta rule, the convolution of LFM2.5-VL-1.6B."""
    pointers = {
        **dict.fromkeys(("mixed_ptr", "gates_ptr", "norm_ptr", "tail_ptr", "out_ptr"), "*bf16"),
        **dict.fromkeys(
            ("convolution_ptr", "decay_ptr", "bias_ptr", "states_ptr", "weight_ptr", "results_ptr"), "*fp32"
        ),
        **dict.fromkeys(("keys_ptr", "values_ptr", "systems_ptr"), "*fp32"),
        "totals_ptr": "*fp64",
        **dict.fromkeys(("starts_ptr", "sources_ptr", "targets_ptr", "positions_ptr", "sequences_ptr"), "*i32"),
        **dict.fromkeys(("num_decodes", "num_segments", "num_sequences"), "i32"),
    }
    heads = {"KEY_HEADS": 16, "HEADS": 32, "KEY": 128, "VALUE": 128}
    tails = {"WIDTH": 12288, "CHANNELS": 8192, "KERNEL": 4, "GATED": False, "BLOCK": 256}
    rows = {"CHANNELS": 2048, "KERNEL": 3, "SEQUENCES": 256, "BLOCK": 256}
    blocks = {**heads, "KERNEL": 4, "KEY_BLOCK": 128, "COLUMNS": 32}
    norm = {"CHANNELS": 8192, "HEADS": 32, "VALUE": 128, "VALUE_BLOCK": 128}
    yield Case("delta rule", states.delta_rule, pointers, blocks, warps=4)
    yield Case("gated norm", states.gated_norm, {**pointers, "eps": "fp32"}, norm, warps=1)
    yield Case("tails", states.keep_tails, pointers, tails, warps=1)
    yield Case("short convolution", states.convolve_rows, pointers, rows, warps=1)
    prepared = {**heads, "KERNEL": 4, "BLOCK": 128}
    solved = {"KEY_HEADS": 16, "HEADS": 32, "KEY": 128, "KEY_BLOCK": 128}
    advanced = {**heads, "KEY_BLOCK": 128, "COLUMNS": 32}
    yield Case("delta chunks: rows", delta_chunks.prepare_rows, pointers, prepared, warps=8)
    yield Case("delta chunks: systems", delta_chunks.solve_chunks, pointers, solved, warps=8)
    yield Case("delta chunks: states", delta_chunks.advance_states, pointers, advanced, warps=4)


def all_cases() -> list[Case]:
    kinds = (product_cases, expert_cases, adapter_cases, expanding_cases, attention_cases, tower_cases, byte_cases)
    return [case for of_kind in (*kinds, other_cases, state_cases) for case in of_kind()]
