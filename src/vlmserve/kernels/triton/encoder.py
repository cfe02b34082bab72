"""Vision tower attention for images of any size, in one launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vlmserve.kernels.ranges import WINDOW_ROWS, Ranges
from vlmserve.kernels.triton import shared_memory
from vlmserve.kernels.triton.attention_kernels import LOG2_E
from vlmserve.kernels.triton.host_math import next_power_of_2
from vlmserve.kernels.triton.launching import Kernel

MAX_HEAD_SIZE = 128
LARGE_BYTES = 100 * 1024
"""Shared memory that allows larger tiles, as on an H100. See `shared_memory.shared_bytes`."""


class TowerTile(NamedTuple):
    keys: int
    warps: int
    stages: int


def tile(block_rows: int, dtype: torch.dtype, shared: int) -> TowerTile:
    """shared: see `shared_memory.shared_bytes`."""
    if dtype == torch.float32:
        return TowerTile(64, 4, 1) if block_rows == WINDOW_ROWS else TowerTile(32, 8, 1)
    if block_rows == WINDOW_ROWS:
        # one tile holds all keys of a window
        return TowerTile(64, 4, 2)
    return TowerTile(64 if shared >= LARGE_BYTES else 32, 8, 3)


@Kernel
@triton.jit
def attend_ranges(
    qkv_ptr, blocks_ptr, out_ptr, scale, HEADS: tl.constexpr, HEAD: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some rows of one range and one head. Programs: ``[blocks, heads]``."""
    block = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    DTYPE: tl.constexpr = qkv_ptr.dtype.element_ty
    SIZE: tl.constexpr = HEADS * HEAD
    begin = tl.load(blocks_ptr + block * 3 + 1)
    end = tl.load(blocks_ptr + block * 3 + 2)
    rows = tl.load(blocks_ptr + block * 3) + tl.arange(0, ROWS)
    columns = tl.arange(0, HEAD_BLOCK)
    inside = columns < HEAD
    valid = (rows < end)[:, None] & inside[None, :]
    query_at = qkv_ptr + rows.to(tl.int64)[:, None] * (3 * SIZE) + head * HEAD + columns[None, :]
    query = tl.load(query_at, valid, 0.0)
    total = tl.zeros((ROWS, HEAD_BLOCK), tl.float32)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    for start in tl.range(begin, end, KEYS, num_stages=STAGES):
        places = start + tl.arange(0, KEYS)
        there = places < end
        keys_at = qkv_ptr + places.to(tl.int64)[:, None] * (3 * SIZE) + SIZE + head * HEAD + columns[None, :]
        keys = tl.load(keys_at, there[:, None] & inside[None, :], 0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * (scale * LOG2_E)
        scores = tl.where(there[None, :], scores, float("-inf"))
        # each row has a finite maximum: the first key of a tile is valid
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        kept = tl.exp2(largest - new_largest)
        weight = weight * kept + tl.sum(weights, 1)
        values = tl.load(keys_at + SIZE, there[:, None] & inside[None, :], 0.0)
        total = tl.dot(weights.to(DTYPE), values, total * kept[:, None], input_precision="ieee")
        largest = new_largest
    result = total / weight[:, None]
    out_at = out_ptr + rows.to(tl.int64)[:, None] * SIZE + head * HEAD + columns[None, :]
    tl.store(out_at, result.to(DTYPE), valid)


@Kernel
@triton.jit
def rotate_rows(
    qkv_ptr, cos_ptr, sin_ptr, stride, HEADS: tl.constexpr, HALF: tl.constexpr, HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    """One row per program in place, in float32. HEADS: queries and keys together."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS_BLOCK)
    columns = tl.arange(0, HALF_BLOCK)
    inside = (heads < HEADS)[:, None] & (columns < HALF)[None, :]
    first_at = qkv_ptr + row * stride + heads[:, None] * (2 * HALF) + columns[None, :]
    first = tl.load(first_at, inside, 0.0).to(tl.float32)
    second = tl.load(first_at + HALF, inside, 0.0).to(tl.float32)
    cos = tl.load(cos_ptr + row * HALF + columns, columns < HALF, 0.0)[None, :]
    sin = tl.load(sin_ptr + row * HALF + columns, columns < HALF, 0.0)[None, :]
    tl.store(first_at, (first * cos - second * sin).to(qkv_ptr.dtype.element_ty), inside)
    tl.store(first_at + HALF, (second * cos + first * sin).to(qkv_ptr.dtype.element_ty), inside)


def unsupported_reason(head_size: int, dtype: torch.dtype) -> str | None:
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the kernels do not support {dtype}"
    if head_size > MAX_HEAD_SIZE:
        return f"a head of {head_size} elements is larger than {MAX_HEAD_SIZE}"
    return None


class TritonRanges:
    def __init__(self, num_heads: int, head_size: int) -> None:
        self._num_heads, self._head_size = num_heads, head_size

    def rotate(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads, half = 2 * self._num_heads, self._head_size // 2
        if len(qkv):
            rotate_rows[(len(qkv),)](
                qkv,
                cos.contiguous(),
                sin.contiguous(),
                qkv.stride(0),
                HEADS=heads,
                HALF=half,
                HEADS_BLOCK=next_power_of_2(heads),
                HALF_BLOCK=next_power_of_2(half),
                num_warps=4,
            )
        return qkv

    def attend(self, qkv: Tensor, ranges: Ranges) -> Tensor:
        qkv = qkv.contiguous()
        out = torch.empty((len(qkv), self._num_heads * self._head_size), dtype=qkv.dtype, device=qkv.device)
        if not len(ranges.blocks):
            return out
        tiles = tile(ranges.block_rows, qkv.dtype, shared_memory.shared_bytes(qkv.device))
        attend_ranges[(len(ranges.blocks), self._num_heads)](
            qkv,
            ranges.blocks,
            out,
            self._head_size**-0.5,
            HEADS=self._num_heads,
            HEAD=self._head_size,
            HEAD_BLOCK=max(16, next_power_of_2(self._head_size)),
            ROWS=ranges.block_rows,
            KEYS=tiles.keys,
            STAGES=tiles.stages,
            num_warps=tiles.warps,
        )
        return out
