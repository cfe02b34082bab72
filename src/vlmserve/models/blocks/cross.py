"""Cross-attention to states that stay fixed while a sequence grows, such as image features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmserve.families.spec import ArchSpec
from vlmserve.kernels.attention import CrossRows
from vlmserve.layers.cut import Shard
from vlmserve.layers.layer import Factory
from vlmserve.layers.linear import Linear, MergedLinear
from vlmserve.layers.parallel import Ranks, RowParallelLinear, scaled, shares
from vlmserve.layers.residual import Unfinished
from vlmserve.models.blocks.attention import fold_of_values, key_heads
from vlmserve.models.blocks.block import Block
from vlmserve.quant.calibration import Fold

CROSS_KV = "cross_attn.kv_proj"


class CrossStates(MergedLinear):
    """Maps states to the keys and values of all cross-attention layers."""

    def __init__(self, spec: ArchSpec, **factory: Unpack[Factory]) -> None:
        parts = {
            f"layers.{index}.cross_attn.{part}": heads.num_kv_heads * heads.head_size
            for index, heads in enumerate(spec.attention)
            for part in ("k_proj", "v_proj")
        }
        self._spec = spec
        super().__init__(spec.cross_size, parts, bias=True, **factory)

    def of_layers(self, states: Tensor) -> Tensor:
        """``[states, cross_size]`` to `CrossRows.states`."""
        heads = self._spec.attention[0]
        shape = (len(states), len(self._spec.attention), 2, heads.num_kv_heads, heads.head_size)
        by_head: Tensor = self(states).view(shape)
        return by_head.permute(1, 2, 3, 0, 4).contiguous()

    def split(self, whole: ArchSpec, ranks: Ranks) -> None:
        heads = [scaled(key_heads(one, ranks), one.head_size) for one in whole.attention]
        self.shard = Shard(tuple(share for share in heads for _ in ("keys", "values")))


class CrossAttention(Block):
    """Cross-attention to each sequence's `CrossRows.states`."""

    readers = ("q_proj",)

    def __init__(self, spec: ArchSpec, index: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.spec = heads = spec.attention[index]
        self._layer = index
        size = heads.num_heads * heads.head_size
        self.kv_proj: MergedLinear | None = None
        """Computes this layer's keys and values; None: `CrossRows.states` holds them."""
        self.q_proj = Linear(spec.hidden_size, size, bias=True, **factory)
        self.o_proj = Linear(size, spec.hidden_size, bias=True, **factory)

    def own_states(self, cross_size: int) -> None:
        """Compute keys and values from ``[states, cross_size]``. Call it before loading; tensor names stay."""
        size = self.spec.num_kv_heads * self.spec.head_size
        parts = {"k_proj": size, "v_proj": size}
        self.kv_proj = MergedLinear(cross_size, parts, bias=True, dtype=self.q_proj.dtype, device=self.q_proj.device)

    def forward(self, x: Tensor, cross: Sequence[CrossRows]) -> Unfinished:
        query = self.q_proj(x).view(len(x), self.spec.num_heads, self.spec.head_size)
        attended = torch.empty_like(query)
        for first, last, states in cross:
            keys, values = states[self._layer] if self.kv_proj is None else self._keys_and_values(states)
            attended[first:last] = F.scaled_dot_product_attention(
                query[None, first:last].transpose(1, 2),
                keys[None],
                values[None],
                scale=self.spec.scale,
                enable_gqa=self.spec.num_heads != self.spec.num_kv_heads,
            )[0].transpose(0, 1)
        return Unfinished(self.o_proj, attended.flatten(1))

    def split(self, whole: ArchSpec, index: int, ranks: Ranks) -> None:
        heads = whole.attention[index]
        queries = scaled(shares(heads.num_heads, ranks), heads.head_size)
        self.q_proj.shard = Shard((queries,))
        self.o_proj = RowParallelLinear(self.o_proj, queries, ranks)

    def folds(self, name: str) -> Iterator[Fold]:
        if self.kv_proj is not None:
            yield fold_of_values(self.spec, f"{name}.o_proj", f"{name}.kv_proj", self.kv_proj.out_features)

    def _keys_and_values(self, states: Tensor) -> Tensor:
        """``[states, cross_size]`` to ``[2, kv_heads, states, head_size]``."""
        assert self.kv_proj is not None
        both: Tensor = self.kv_proj(states)
        return both.view(len(states), 2, self.spec.num_kv_heads, self.spec.head_size).permute(1, 2, 0, 3)
