"""Self-attention over the paged cache: projections, RoPE and an attention backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack, cast

import torch
from torch import Tensor, nn

from vlmserve.families.spec import ArchSpec
from vlmserve.kernels.attention import (
    AttentionBackend,
    AttentionContext,
    HeadNorms,
    LayerCache,
    NormingBackend,
    RotaryRows,
    RotatingBackend,
)
from vlmserve.kernels.operations import GateKernel, HeadsNorm, Normed, NormedHeads, Operations
from vlmserve.layer_specs import AttentionSpec, RopeSpec
from vlmserve.layers.cut import Shard, Share
from vlmserve.layers.layer import Factory, Layer
from vlmserve.layers.linear import Linear, MergedLinear
from vlmserve.layers.norm import LayerNorm, NormOfEachHead, NormOfRow, RMSNorm, UnitNorm
from vlmserve.layers.parallel import ParallelNormOfRow, Ranks, RowParallelLinear, scaled, shares
from vlmserve.layers.residual import Unfinished
from vlmserve.layers.rope import apply_rope
from vlmserve.layers.step import StepContext
from vlmserve.models.blocks.block import Block, make_norm
from vlmserve.quant.calibration import Fold


class QKVLinear(MergedLinear):
    """Queries, keys and values of all heads, after any output gates. Layers that share keys and values have only
    queries.
    """

    def __init__(self, spec: ArchSpec, heads: AttentionSpec, rope: RopeSpec | None, **factory: Unpack[Factory]) -> None:
        self._heads, self._rope = heads, rope
        query_size, kv_size = (count * heads.head_size for count in (heads.num_heads, heads.num_kv_heads))
        gates = {"elements": query_size, "projected": query_size, "heads": heads.num_heads, None: 0}
        self.num_gates = gates[spec.output_gate]
        self._gates_queries = spec.output_gate == "elements"
        parts = {"q_proj": query_size + self.num_gates}
        if spec.output_gate in ("heads", "projected"):
            parts = {"g_proj" if spec.output_gate == "heads" else "gate_proj": self.num_gates, "q_proj": query_size}
        if heads.shares_with is None:
            parts |= {"k_proj": kv_size, "v_proj": kv_size}
        super().__init__(spec.hidden_size, parts, bias=spec.qkv_bias, **factory)
        if heads.values_are_keys:
            self.repeated = {"k_proj": "v_proj"}

    def settle(self) -> None:
        """Move gates before queries, and reorder queries and keys for `apply_rope`."""
        heads, size = self._heads.num_heads, self._heads.head_size
        if self._heads.shares_with is None:
            heads += self._heads.num_kv_heads
        rows = torch.arange(self.out_features)
        if self._gates_queries:
            # A checkpoint has each head's queries followed by its gates.
            both = rows[: 2 * self.num_gates].view(self._heads.num_heads, 2, size)
            both.copy_(both.flip(1).transpose(0, 1).reshape(both.shape))
        if self._rope is not None and self._rope.interleaved:
            order = torch.arange(size)
            order[: self._rope.size] = order[: self._rope.size].view(-1, 2).T.flatten()
            rotated = rows[self.num_gates :][: heads * size].view(heads, -1)
            rotated.copy_(rotated[:, order].clone())
        elif not self._gates_queries:
            return
        self.reorder(rows.to(self.device))


class Attention(Block, Layer):
    """Self-attention ``[tokens, hidden_size]`` with one layer's cache."""

    readers = ("qkv_proj",)

    def __init__(
        self, spec: ArchSpec, index: int, backend: AttentionBackend, *, rope: int | None, **factory: Unpack[Factory]
    ) -> None:
        """rope: index of the step's rotary embedding, if any."""
        super().__init__()
        heads = spec.mixers[index]
        assert isinstance(heads, AttentionSpec)
        self.spec = heads
        self.backend = backend
        self._rotating = backend if isinstance(backend, RotatingBackend) else None
        self._norming = backend if isinstance(backend, NormingBackend) else None
        self._rope = rope
        self._head_norms: HeadNorms | None = None
        self._heads_norm: HeadsNorm | None = None
        self._gate: GateKernel | None = None
        self.qkv_proj = QKVLinear(spec, heads, spec.ropes[index], **factory)
        query_size = self.spec.num_heads * self.spec.head_size
        self.o_proj = Linear(query_size, spec.hidden_size, bias=spec.output_bias, **factory)
        self.q_norm = _head_norm(spec, self.spec.head_size, self.spec.num_heads, **factory)
        self._shares = heads.shares_with is not None
        self.k_norm = self._value_norm = None
        if not self._shares:
            self.k_norm = _head_norm(spec, self.spec.head_size, self.spec.num_kv_heads, **factory)
            if spec.head_norm is not None and spec.head_norm.values:
                self._value_norm = UnitNorm(heads.head_size, spec.head_norm.norm.eps, device=factory["device"])

    @property
    def reader(self) -> Linear:
        return self.qkv_proj

    def forward(self, x: Normed, cache: LayerCache, step: StepContext) -> Unfinished:
        context = AttentionContext(cache, self.spec, step.metadata, step.plan)
        rows, gates = self.qkv_proj(x), self.qkv_proj.num_gates
        if not gates:
            return Unfinished(self.o_proj, self._attended(rows, step, context))
        attended = self._attended(rows[:, gates:], step, context)
        if self._gate is not None:
            return Unfinished(self.o_proj, self._gate(attended, rows[:, :gates]))
        opened = attended.view(len(rows), gates, -1) * rows[:, :gates, None].sigmoid()
        return Unfinished(self.o_proj, opened.flatten(1))

    def split(self, whole: ArchSpec, index: int, ranks: Ranks) -> None:
        heads = whole.mixers[index]
        assert isinstance(heads, AttentionSpec)
        kv_heads = key_heads(heads, ranks)
        queries, keys = scaled(shares(heads.num_heads, ranks), heads.head_size), scaled(kv_heads, heads.head_size)
        device = self.o_proj.device
        parts = [scaled(queries, 2) if whole.output_gate == "elements" else queries]
        if whole.output_gate == "heads":
            parts.insert(0, shares(heads.num_heads, ranks))
        elif whole.output_gate == "projected":
            parts.insert(0, queries)
        self.qkv_proj.shard = Shard(tuple(parts) if self._shares else (*parts, keys, keys))
        self.o_proj = RowParallelLinear(self.o_proj, queries, ranks)
        if isinstance(self.q_norm, NormOfEachHead) and isinstance(self.k_norm, NormOfEachHead):
            self.q_norm.first_head = queries.first // heads.head_size
            self.k_norm.first_head = kv_heads.first
        if isinstance(self.q_norm, NormOfRow) and isinstance(self.k_norm, NormOfRow):
            copies = max(1, ranks.size // heads.num_kv_heads)
            self.q_norm = ParallelNormOfRow(self.q_norm, queries, 1, ranks, device=device)
            self.k_norm = ParallelNormOfRow(self.k_norm, keys, copies, ranks, device=device)

    def folds(self, name: str) -> Iterator[Fold]:
        if not self._shares and self._value_norm is None:
            yield fold_of_values(self.spec, f"{name}.o_proj", f"{name}.qkv_proj", self.qkv_proj.out_features)

    def arrange(self, operations: Operations) -> None:
        parts, first = [], 0
        normed = self._normed_parts
        for norm, heads in normed:
            if (part := _normed_heads(norm, first, heads)) is not None:
                parts.append(part)
            first += heads * self.spec.head_size
        if len(parts) == len(normed):
            self._heads_norm = operations.heads_norm(parts, self.qkv_proj.dtype)
        if self.qkv_proj.num_gates:
            self._gate = operations.output_gate(self.qkv_proj.dtype)

    @property
    def _normed_parts(self) -> list[tuple[nn.Module | None, int]]:
        """Norms of heads in the order of a row, each with its number of heads."""
        parts = [(self.q_norm, self.spec.num_heads)]
        if not self._shares:
            parts.append((self.k_norm, self.spec.num_kv_heads))
        if self._value_norm is not None:
            parts.append((self._value_norm, self.spec.num_kv_heads))
        return parts

    def _attended(self, qkv: Tensor, step: StepContext, context: AttentionContext) -> Tensor:
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
        """True if `HeadNorms` can describe the norms of queries and keys."""
        return type(self.q_norm) is RMSNorm and type(self.k_norm) is RMSNorm and self._value_norm is None

    def _norms(self) -> HeadNorms:
        if self._head_norms is None:
            norms = cast(RMSNorm, self.q_norm), cast(RMSNorm, self.k_norm)
            query, key = (norm.weight.data.float() + norm.offset if norm.offset else norm.weight.data for norm in norms)
            self._head_norms = HeadNorms(query, key, norms[0].eps)
        return self._head_norms

    def _normed(self, qkv: Tensor) -> Tensor:
        heads, first = qkv.view(qkv.shape[0], -1, self.spec.head_size), 0
        for norm, count in self._normed_parts:
            part = heads[:, first : first + count]
            first += count
            if norm is not None:
                part.copy_(norm(part))
        return qkv

    def _attend(self, qkv: Tensor, step: StepContext, context: AttentionContext) -> Tensor:
        spec = self.spec
        qkv = qkv.view(qkv.shape[0], -1, spec.head_size)
        # Queries and keys are adjacent, so one call rotates both.
        both = qkv[:, : spec.num_heads + (0 if self._shares else spec.num_kv_heads)]
        if self._rope is not None:
            both = apply_rope(both, step.ropes[self._rope])
        if self._shares:
            return self.backend.attend(both, None, None, context)
        query, key = both[:, : spec.num_heads], both[:, spec.num_heads :]
        value = qkv[:, spec.num_heads + spec.num_kv_heads :]
        return self.backend.attend(query, key, value, context)


def _normed_heads(norm: nn.Module | None, first: int, heads: int) -> NormedHeads | None:
    if type(norm) is UnitNorm:
        return NormedHeads(first, torch.ones(heads, norm.size, device=norm.device), norm.eps, centered=False)
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


def _head_norm(spec: ArchSpec, head_size: int, heads: int, **factory: Unpack[Factory]) -> nn.Module | None:
    if (kind := spec.head_norm) is None:
        return None
    if not kind.weights:
        return UnitNorm(head_size, kind.norm.eps, device=factory["device"])
    if kind.over == "head":
        return make_norm(kind.norm, head_size, **factory)
    if kind.over == "each head":
        return NormOfEachHead(heads, head_size, kind.norm.eps, **factory)
    return NormOfRow(heads * head_size, kind.norm.eps, **factory)


def fold_of_values(heads: AttentionSpec, consumer: str, producer: str, outputs: int) -> Fold:
    """Fold factors of the output projection's inputs into the values, the last outputs of `producer`. Heads that read
    the same values share factors."""
    values = heads.num_kv_heads * heads.head_size
    return Fold(
        (consumer,),
        producer=producer,
        rows=(outputs - values, outputs),
        heads=heads.num_heads,
        shared=heads.num_heads // heads.num_kv_heads,
    )


def key_heads(heads: AttentionSpec, ranks: Ranks) -> Share:
    """This rank's KV heads. If there are more ranks than heads, ranks share heads."""
    if heads.num_kv_heads >= ranks.size:
        return shares(heads.num_kv_heads, ranks)
    first = ranks.rank * heads.num_kv_heads // ranks.size
    return Share(first, first + 1, heads.num_kv_heads)
