"""A layer of a decoder, for every family."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from vlmserve.families.spec import ArchSpec, NormSpec
from vlmserve.kernels.attention import AttentionBackend, LayerCache
from vlmserve.kernels.operations import DeferredNorm, NormedRows
from vlmserve.layers.attention import Attention, CrossAttention, HeadNorm, StepContext
from vlmserve.layers.linear import GatedLinear, Linear
from vlmserve.layers.norm import Block, LayerNorm, Normalization, NormOfEachHead, NormOfRow, RMSNorm, summed

LayerRows: TypeAlias = "Tensor | NormedRows | DeferredNorm"
"""What a layer gets and gives, ``[tokens, hidden_size]``: by itself, or with the norm that follows on it."""


class MLP(nn.Module):
    """``act(gate(x)) * up(x)`` (https://arxiv.org/abs/2002.05202) or ``act(up(x))``, and then `down_proj`."""

    def __init__(self, spec: ArchSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, inner = spec.hidden_size, spec.intermediate_size
        kind: dict[str, Any] = {"bias": spec.mlp_bias, "dtype": dtype, "device": device}
        self._gated = spec.gated
        if spec.gated:
            parts = {"gate_proj": inner, "up_proj": inner}
            self.gate_up_proj = GatedLinear(hidden, parts, spec.activation, **kind)
        else:
            self.up_proj = Linear(hidden, inner, act=spec.activation, **kind)
        self.down_proj = Linear(inner, hidden, **kind)

    @property
    def first(self) -> Linear:
        """The projection before the activation."""
        return self.gate_up_proj if self._gated else self.up_proj

    def forward(self, x: Tensor | DeferredNorm) -> Tensor:
        """What `down_proj` takes."""
        return self.first.of_normed(x)


class NextNorm(NamedTuple):
    """The norm that follows on a block. reader: the only layer that takes what it makes; None: there are others."""

    norm: Normalization
    reader: Linear | None

    @classmethod
    def of(cls, norm: Normalization | None, reader: Linear | None) -> NextNorm | None:
        """None: there is no norm."""
        return None if norm is None else cls(norm, reader)

    def may_be_left(self, rows: Tensor) -> bool:
        """Whether the reader can complete it for such rows."""
        return self.norm.kernel is not None and self.reader is not None and self.reader.completes_norms(rows)


class DecoderLayer(nn.Module):
    """Attention and MLP, and cross attention between them if there is any, each beside a residual, with norms where the
    family has them."""

    def __init__(
        self,
        spec: ArchSpec,
        index: int,
        rope: int | None,
        backend: AttentionBackend,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """rope: which of the decoder's rotations is this layer's; None: none."""
        super().__init__()
        norm = partial(make_norm, spec.norm, spec.hidden_size, dtype=dtype, device=device)
        of_inputs, of_outputs = spec.norms in ("pre", "sandwich"), spec.norms != "pre"
        self.attention_norm = norm() if of_inputs else None
        self.attention_output_norm = norm() if of_outputs else None
        self.mlp_norm = norm() if of_inputs and not spec.parallel else None
        self.mlp_output_norm = norm() if of_outputs else None
        self.self_attn = Attention(
            spec.hidden_size,
            spec.attention[index],
            backend,
            rope=rope,
            qkv_bias=spec.qkv_bias,
            output_bias=spec.output_bias,
            head_norm=head_norm(spec, index, dtype=dtype, device=device),
            dtype=dtype,
            device=device,
        )
        self.cross_norm = norm() if of_inputs and spec.cross_size else None
        self.cross_output_norm = norm() if of_outputs and spec.cross_size else None
        self.cross_attn = (
            CrossAttention(spec.hidden_size, spec.attention[index], index, dtype=dtype, device=device)
            if spec.cross_size
            else None
        )
        self.mlp = MLP(spec, dtype=dtype, device=device)
        self._parallel = spec.parallel
        self._post_norm = spec.norms == "post"

    @property
    def entry(self) -> NextNorm | None:
        """The norm of what the layer gets, which the layer before may compute; None: there is none."""
        if self.attention_norm is None:
            return None
        return NextNorm(self.attention_norm, None if self._parallel else self.self_attn.qkv_proj)

    def forward(
        self,
        x: LayerRows,
        cache: LayerCache,
        step: StepContext,
        wanted: Tensor | None = None,
        following: NextNorm | None = None,
    ) -> LayerRows:
        """``[tokens, hidden_size]`` to the same, or to the rows that are wanted: of others it has keys and values. x:
        with `entry`, if it is not a tensor. The result is one, or has the norm that follows."""
        rows, normed = _rows_and_inputs(x, self.attention_norm)
        attended = self.self_attn.attended(normed, cache, step)
        if wanted is not None:
            rows, attended = rows[wanted], attended[wanted]
            if not isinstance(normed, DeferredNorm):
                normed = normed[wanted]
            if not len(wanted):
                return rows
            if step.adapters is not None:
                step.adapters.narrow(wanted)
        output, output_norm = self.self_attn.o_proj, self.attention_output_norm
        to_mlp = NextNorm.of(self.mlp_norm, self.mlp.first)
        if self._parallel:
            rows = output(attended, rows)
        elif self.cross_attn is None:
            rows, normed = _rows_and_inputs(self._ended(output, attended, rows, output_norm, to_mlp), self.mlp_norm)
        else:
            to_cross = NextNorm.of(self.cross_norm, None)
            sums = self._ended(output, attended, rows, output_norm, to_cross)
            rows, normed = _rows_and_inputs(sums, self.cross_norm)
            assert not isinstance(normed, DeferredNorm)
            cross = partial(self.cross_attn, normed, cross=step.metadata.cross)
            crossed = self._summed(cross, rows, self.cross_output_norm, to_mlp)
            rows, normed = _rows_and_inputs(crossed, self.mlp_norm)
        return self._ended(self.mlp.down_proj, self.mlp(normed), rows, self.mlp_output_norm, following)

    def _ended(
        self,
        linear: Linear,
        inputs: Tensor,
        x: Tensor,
        output_norm: Normalization | None,
        following: NextNorm | None,
    ) -> LayerRows:
        """x and what a block adds to it whose last layer is `linear`, with the norm that follows where the device
        computes that on the way."""
        if following is not None and output_norm is None and following.may_be_left(x):
            assert following.norm.kernel is not None
            deferred = linear.deferring(inputs, x, following.norm.kernel)
            if deferred is not None:
                return deferred
        return self._summed(partial(linear, inputs), x, output_norm, following)

    def _summed(
        self, block: Block, x: Tensor, output_norm: Normalization | None, following: NextNorm | None
    ) -> Tensor | NormedRows:
        """As `_ended`, of any block."""
        if self._post_norm:
            assert output_norm is not None
            output: Tensor = output_norm(block(x))
            return output
        return summed(block, x, None if following is None else following.norm, output_norm)


def _rows_and_inputs(x: LayerRows, norm: Normalization | None) -> tuple[Tensor, Tensor | DeferredNorm]:
    """The rows to add to, and what the next block takes: those that `norm` makes of them, if there is one."""
    if isinstance(x, NormedRows):
        return x.rows, x.normed
    if isinstance(x, DeferredNorm):
        return x.rows, x
    return x, x if norm is None else norm(x)


def make_norm(spec: NormSpec, size: int, *, dtype: torch.dtype, device: torch.device) -> RMSNorm | LayerNorm:
    """The norm that a spec describes."""
    if spec.layer:
        return LayerNorm(size, spec.eps, dtype=dtype, device=device)
    return RMSNorm(size, spec.eps, offset=spec.offset, dtype=dtype, device=device)


def head_norm(spec: ArchSpec, index: int, *, dtype: torch.dtype, device: torch.device) -> HeadNorm | None:
    """How a layer norms queries and keys, if at all."""
    kind = spec.head_norm
    if kind is None:
        return None
    size = spec.attention[index].head_size
    if kind.over == "head":
        return lambda heads: make_norm(kind.norm, size, dtype=dtype, device=device)
    if kind.over == "each head":
        return lambda heads: NormOfEachHead(heads, size, kind.norm.eps, dtype=dtype, device=device)
    return lambda heads: NormOfRow(heads * size, kind.norm.eps, dtype=dtype, device=device)
