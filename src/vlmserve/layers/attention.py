"""Attention of a decoder layer: projections, rotary positions and a backend over the paged cache; cross attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlmserve.kernels.adapters import AdapterRows
from vlmserve.kernels.attention import (
    AttentionBackend,
    AttentionContext,
    BatchMetadata,
    CrossRows,
    HeadNorms,
    LayerCache,
    NormingBackend,
    RotaryRows,
    RotatingBackend,
)
from vlmserve.kernels.operations import DeferredNorm, HeadsNorm, NormedHeads, Operations
from vlmserve.layer_specs import AttentionSpec
from vlmserve.layers.layer import Layer
from vlmserve.layers.linear import Linear, MergedLinear
from vlmserve.layers.norm import LayerNorm, NormOfEachHead, NormOfRow, RMSNorm
from vlmserve.layers.rope import RopeTables, apply_rope

HeadNorm = Callable[[int], nn.Module]
"""From a number of heads to what norms ``[tokens, heads, head_size]``."""


@dataclass(frozen=True, slots=True)
class StepContext:
    """What all layers of one step share. ropes: the rotations that layers use. plan: the backend's. query_scale:
    ``[tokens, 1]``, what queries are multiplied with; None: all with 1. adapters: which rows have one; None: no row
    has."""

    metadata: BatchMetadata
    ropes: Sequence[RopeTables]
    plan: object
    query_scale: Tensor | None = None
    adapters: AdapterRows | None = None


class Attention(Layer):
    """Projections and attention through one layer's cache: `attended`, and then `o_proj`."""

    def __init__(
        self,
        hidden_size: int,
        spec: AttentionSpec,
        backend: AttentionBackend,
        *,
        rope: int | None,
        qkv_bias: bool,
        output_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        head_norm: HeadNorm | None = None,
    ) -> None:
        """rope: which of a step's rotations queries and keys get; None: none. head_norm: norms them before."""
        super().__init__()
        self.spec = spec
        self.backend = backend
        self._rotating = backend if isinstance(backend, RotatingBackend) else None
        self._norming = backend if isinstance(backend, NormingBackend) else None
        self._rope = rope
        self._head_norms: HeadNorms | None = None
        self._heads_norm: HeadsNorm | None = None
        query_size, kv_size = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
        parts = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = MergedLinear(hidden_size, parts, bias=qkv_bias, dtype=dtype, device=device)
        self.o_proj = Linear(query_size, hidden_size, bias=output_bias, dtype=dtype, device=device)
        self.q_norm = self.k_norm = None
        if head_norm is not None:
            self.q_norm, self.k_norm = head_norm(spec.num_heads), head_norm(spec.num_kv_heads)

    def arrange(self, operations: Operations) -> None:
        """See `Layer.arrange`. Norms have their weights by then."""
        sizes = [self.spec.num_heads, self.spec.num_kv_heads]
        parts, first = [], 0
        for norm, heads in zip((self.q_norm, self.k_norm), sizes, strict=True):
            if (part := _normed_heads(norm, first, heads)) is not None:
                parts.append(part)
            first += heads * self.spec.head_size
        if len(parts) == len(sizes):
            self._heads_norm = operations.heads_norm(parts, self.qkv_proj.dtype)

    def attended(self, x: Tensor | DeferredNorm, cache: LayerCache, step: StepContext) -> Tensor:
        """``[tokens, hidden_size]``, normed or with the norm left to the projection, to what heads make of values, side
        by side, for `o_proj`."""
        qkv = self.qkv_proj.of_normed(x)
        context = AttentionContext(cache, self.spec, step.metadata, step.plan)
        if self._norming is not None and step.query_scale is None and self._norms_each_head:
            norms, rope = self._norms(), self._rows(step)
            return self._norming.attend_normed(qkv, norms, rope, context)
        if self._heads_norm is not None:
            self._heads_norm(qkv)
        elif self.q_norm is not None:
            qkv = self._normed(qkv)
        if step.query_scale is not None:
            qkv[:, : self.spec.num_heads * self.spec.head_size] *= step.query_scale
        if self._rotating is None:
            return self._attend(qkv, step, context)
        return self._rotating.attend_rotated(qkv, self._rows(step), context)

    def _rows(self, step: StepContext) -> RotaryRows | None:
        return None if self._rope is None else step.ropes[self._rope].rows

    @property
    def _norms_each_head(self) -> bool:
        """Whether `HeadNorms` say how queries and keys are normed."""
        return type(self.q_norm) is RMSNorm and type(self.k_norm) is RMSNorm

    def _norms(self) -> HeadNorms:
        if self._head_norms is None:
            norms = cast(RMSNorm, self.q_norm), cast(RMSNorm, self.k_norm)
            query, key = (norm.weight.data.float() + norm.offset if norm.offset else norm.weight.data for norm in norms)
            self._head_norms = HeadNorms(query, key, norms[0].eps)
        return self._head_norms

    def _normed(self, qkv: Tensor) -> Tensor:
        """The same with queries and keys normed, where they are."""
        assert self.q_norm is not None
        assert self.k_norm is not None
        spec = self.spec
        heads = qkv.view(qkv.shape[0], -1, spec.head_size)
        query, key, _ = torch.split(heads, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], 1)
        query.copy_(self.q_norm(query))
        key.copy_(self.k_norm(key))
        return qkv

    def _attend(self, qkv: Tensor, step: StepContext, context: AttentionContext) -> Tensor:
        spec = self.spec
        qkv = qkv.view(qkv.shape[0], -1, spec.head_size)
        # Queries and keys lie side by side and are rotated together.
        both = qkv[:, : spec.num_heads + spec.num_kv_heads]
        if self._rope is not None:
            both = apply_rope(both, step.ropes[self._rope])
        query, key = both[:, : spec.num_heads], both[:, spec.num_heads :]
        value = qkv[:, spec.num_heads + spec.num_kv_heads :]
        return self.backend.attend(query, key, value, context)


def _normed_heads(norm: nn.Module | None, first: int, heads: int) -> NormedHeads | None:
    """The heads that a module norms, from element `first` of a row on; None: no kernel computes it."""
    if type(norm) is RMSNorm:
        weight = (norm.weight.data.float() + norm.offset).expand(heads, -1).contiguous()
        return NormedHeads(first, weight, norm.eps, centered=False)
    if type(norm) is LayerNorm:
        weight, bias = (tensor.data.float().expand(heads, -1).contiguous() for tensor in (norm.weight, norm.bias))
        return NormedHeads(first, weight, norm.eps, centered=True, bias=bias)
    if type(norm) is NormOfEachHead:
        return NormedHeads(first, norm.weight.data.float().contiguous(), norm.eps, centered=True)
    if type(norm) is NormOfRow:
        return NormedHeads(first, (norm.weight.data.float() + norm.offset)[None], norm.eps, centered=False)
    return None


class CrossAttention(nn.Module):
    """``[tokens, hidden_size]`` to the same: each sequence attends to all of its own `CrossRows.states`, and they do
    not change while it grows.

    kv_proj: makes this layer's keys and values of `CrossRows.states`; None: they are there already.
    """

    def __init__(
        self, hidden_size: int, spec: AttentionSpec, layer: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.spec = spec
        self._layer = layer
        size = spec.num_heads * spec.head_size
        self.kv_proj: MergedLinear | None = None
        self.q_proj = Linear(hidden_size, size, bias=True, dtype=dtype, device=device)
        self.o_proj = Linear(size, hidden_size, bias=True, dtype=dtype, device=device)

    def forward(self, x: Tensor, residual: Tensor | None, cross: Sequence[CrossRows]) -> Tensor:
        """residual: added to the output."""
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
        output: Tensor = self.o_proj(attended.flatten(1), residual)
        return output

    def _keys_and_values(self, states: Tensor) -> Tensor:
        """``[states, cross_size]`` to ``[2, kv_heads, states, head_size]``."""
        assert self.kv_proj is not None
        both: Tensor = self.kv_proj(states)
        return both.view(len(states), 2, self.spec.num_kv_heads, self.spec.head_size).permute(1, 2, 0, 3)
