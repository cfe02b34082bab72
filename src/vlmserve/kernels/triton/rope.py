"""Applies head norms and RoPE, and writes keys and values to the cache, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vlmserve.kernels.attention import HeadNorms, LayerCache, RotaryRows
from vlmserve.kernels.triton.dependent import wait_for_previous
from vlmserve.kernels.triton.host_math import next_power_of_2
from vlmserve.kernels.triton.launching import Kernel
from vlmserve.kernels.triton.unpacking import to_float8
from vlmserve.layer_specs import AttentionSpec


@triton.jit
def load_turn(cos_ptr, sin_ptr, columns, ROTATED: tl.constexpr):
    """Each column's factor and its partner's, at a token's position."""
    half: tl.constexpr = ROTATED // 2
    rotated = columns < ROTATED
    pair = tl.where(columns < half, columns, columns - half)
    cos = tl.load(cos_ptr + pair, rotated, 1.0)
    sin = tl.load(sin_ptr + pair, rotated, 0.0)
    return cos, tl.where(columns < half, -sin, sin)


@triton.jit
def to_partners(columns, ROTATED: tl.constexpr):
    half: tl.constexpr = ROTATED // 2
    return tl.where(columns < half, half, -half)


@triton.jit
def load_heads(x_ptr, offsets, inside, columns, ROTATED: tl.constexpr):
    other = to_partners(columns, ROTATED)
    turned = (columns < ROTATED)[None, :] & inside
    return tl.load(x_ptr + offsets, inside, 0.0), tl.load(x_ptr + offsets + other[None, :], turned, 0.0)


@triton.jit
def load_weights(weight_ptr, columns, HEAD: tl.constexpr, ROTATED: tl.constexpr):
    partners = columns + to_partners(columns, ROTATED)
    weight = tl.load(weight_ptr + columns, columns < HEAD, 0.0)
    return weight, tl.load(weight_ptr + partners, columns < ROTATED, 0.0)


@triton.jit
def norm_heads(x, partner, weight, partner_weight, eps, HEAD: tl.constexpr):
    numbers = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(numbers * numbers, 1) / HEAD + eps)[:, None]
    normed = numbers * scale * weight.to(tl.float32)[None, :]
    normed_partner = partner.to(tl.float32) * scale * partner_weight.to(tl.float32)[None, :]
    return normed.to(x.dtype), normed_partner.to(x.dtype)


@triton.jit
def rotate(x, partner, cos, sin):
    turned = x.to(tl.float32) * cos[None, :] + partner.to(tl.float32) * sin[None, :]
    return turned.to(x.dtype)


@triton.jit
def finished_heads(
    x_ptr, offsets, inside, columns, weight_ptr, cos_ptr, sin_ptr, eps, HEAD: tl.constexpr, ROTATED: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):  # fmt: skip
    heads, partner = load_heads(x_ptr, offsets, inside, columns, ROTATED)
    if HAS_NORMS:
        weight, partner_weight = load_weights(weight_ptr, columns, HEAD, ROTATED)
        heads, partner = norm_heads(heads, partner, weight, partner_weight, eps, HEAD)
    if ROTATED > 0:
        cos, sin = load_turn(cos_ptr, sin_ptr, columns, ROTATED)
        heads = rotate(heads, partner, cos, sin)
    return heads


@triton.jit
def store_tile(
    x, cache_ptr, scales_ptr, heads, columns, inside, slot, WHICH: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """One token's keys (WHICH 0) or values (1) ``[heads, HEAD]``. QUANTIZED: "int8", "fp8" or ""."""
    block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    rows = ((block * KV_HEADS + heads) * BLOCK_SIZE + place) * HEAD
    if QUANTIZED != "":
        most: tl.constexpr = 448.0 if QUANTIZED == "fp8" else 127.0
        x = x.to(tl.float32)
        magnitude = tl.abs(x)
        largest = tl.max(magnitude, 1)
        # a maximum may ignore NaN, a sum does not
        finite = tl.sum(tl.where(magnitude < float("inf"), 0, 1), 1) == 0
        tl.store(
            scales_ptr + ((block * KV_HEADS + heads) * 2 + WHICH) * BLOCK_SIZE + place,
            tl.where(finite, tl.div_rn(largest, most), float("nan")),
            heads < KV_HEADS,
        )
        scaled = x * tl.div_rn(most, tl.where(finite & (largest > 0), largest, 1.0))[:, None]
        scaled = tl.where(finite[:, None], scaled, 0.0)
        # adding 1.5 * 2^23 rounds to an integer, ties to even
        x = to_float8(scaled) if QUANTIZED == "fp8" else ((scaled + 12582912.0) - 12582912.0).to(tl.int8)
    tl.store(cache_ptr + rows[:, None] + columns[None, :], x.to(cache_ptr.dtype.element_ty), inside)


@Kernel
@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def rotate_and_write(
    qkv_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, query_norm_ptr, key_norm_ptr, query_ptr, keys_ptr, values_ptr,
    scales_ptr, stride, eps, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEADS_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, HAS_NORMS: tl.constexpr, QUANTIZED: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Queries if the second index is 0, else keys and values. HAS_NORMS: see `HeadNorms`."""
    wait_for_previous(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(positions_ptr + token) if HAS_POSITIONS else token
    cos_ptr += row * (ROTATED // 2)
    sin_ptr += row * (ROTATED // 2)
    columns = tl.arange(0, HEAD_BLOCK)
    x_ptr = qkv_ptr + token * stride
    if tl.program_id(1) == 0:
        heads = tl.arange(0, HEADS_BLOCK)
        inside = (heads < HEADS)[:, None] & (columns < HEAD)[None, :]
        offsets = heads[:, None] * HEAD + columns[None, :]
        query = finished_heads(
            x_ptr, offsets, inside, columns, query_norm_ptr, cos_ptr, sin_ptr, eps, HEAD, ROTATED, HAS_NORMS
        )
        tl.store(query_ptr + token * (HEADS * HEAD) + offsets, query, inside)
    else:
        slot = tl.load(slots_ptr + token)
        kv_heads = tl.arange(0, KV_BLOCK)
        there = (kv_heads < KV_HEADS)[:, None] & (columns < HEAD)[None, :]
        keys_at = (HEADS + kv_heads)[:, None] * HEAD + columns[None, :]
        value = tl.load(x_ptr + keys_at + KV_HEADS * HEAD, there, 0.0)
        key = finished_heads(
            x_ptr, keys_at, there, columns, key_norm_ptr, cos_ptr, sin_ptr, eps, HEAD, ROTATED, HAS_NORMS
        )
        store_tile(key, keys_ptr, scales_ptr, kv_heads, columns, there, slot, 0, KV_HEADS, HEAD, BLOCK_SIZE, QUANTIZED)
        store_tile(
            value, values_ptr, scales_ptr, kv_heads, columns, there, slot, 1, KV_HEADS, HEAD, BLOCK_SIZE, QUANTIZED
        )


def rotate_into_cache(
    qkv: Tensor,
    rope: RotaryRows | None,
    cache: LayerCache,
    spec: AttentionSpec,
    slots: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Apply norm and RoPE, and write keys and values to their slots.

    qkv: contiguous ``[tokens, (heads + 2 * kv_heads) * head_size]``; only queries for layers that share keys and
    values. slots: int64 ``[tokens]``. Returns queries ``[tokens, heads * head_size]``.
    """
    tokens = len(qkv)
    query = torch.empty((tokens, spec.num_heads * spec.head_size), dtype=qkv.dtype, device=qkv.device)
    cos, sin, positions = (query, query, None) if rope is None else rope
    rotate_and_write[(tokens, 2 if spec.shares_with is None else 1)](
        qkv,
        cos,
        sin,
        slots if positions is None else positions,
        slots,
        query if norms is None else norms.query,
        query if norms is None else norms.key,
        query,
        cache.keys,
        cache.values,
        cache.keys if cache.scales is None else cache.scales,
        qkv.stride(0),
        0.0 if norms is None else norms.eps,
        HEADS=spec.num_heads,
        KV_HEADS=spec.num_kv_heads,
        HEAD=spec.head_size,
        ROTATED=0 if rope is None else 2 * cos.shape[1],
        BLOCK_SIZE=cache.block_size,
        HEADS_BLOCK=next_power_of_2(spec.num_heads),
        KV_BLOCK=next_power_of_2(spec.num_kv_heads),
        HEAD_BLOCK=next_power_of_2(spec.head_size),
        HAS_POSITIONS=positions is not None,
        HAS_NORMS=norms is not None,
        QUANTIZED="" if cache.scales is None else cache.stored,
        num_warps=4,
    )
    return query
