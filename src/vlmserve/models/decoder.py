"""One decoder for every family: configured by an `ArchSpec`. Implements `LanguageModel`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn

from vlmserve.devices.device import EagerExecutor, LayerExecutor
from vlmserve.kernels.attention import AttentionBackend, AttentionSpec, BatchMetadata, LayerCache
from vlmserve.kernels.transfers import to_device
from vlmserve.layers.adapters import AdapterRows
from vlmserve.layers.attention import Attention, CrossAttention, HeadNorm, StepContext
from vlmserve.layers.linear import Bias, Embedding, GatedLinear, Linear, MergedLinear, OutputLinear, TiedEmbedding
from vlmserve.layers.norm import Block, LayerNorm, NormOfEachHead, NormOfRow, RMSNorm, summed
from vlmserve.layers.operations import DeferredNorm, NormedRows
from vlmserve.layers.rope import Rope, RopeSpec, RopeTables
from vlmserve.models.image_rows import LayerFeatures, add_features
from vlmserve.models.spec import ArchSpec, NormSpec
from vlmserve.types import Bidirectional

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

    norm: RMSNorm | LayerNorm
    reader: Linear | None

    @classmethod
    def of(cls, norm: RMSNorm | LayerNorm | None, reader: Linear | None) -> NextNorm | None:
        """None: there is no norm."""
        return None if norm is None else cls(norm, reader)

    def may_be_left(self, rows: int) -> bool:
        """Whether the reader can complete it for so many rows."""
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
            if isinstance(normed, Tensor):
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
            assert isinstance(normed, Tensor)
            cross = partial(self.cross_attn, normed, cross=step.metadata.cross)
            crossed = self._summed(cross, rows, self.cross_output_norm, to_mlp)
            rows, normed = _rows_and_inputs(crossed, self.mlp_norm)
        return self._ended(self.mlp.down_proj, self.mlp(normed), rows, self.mlp_output_norm, following)

    def _ended(
        self,
        linear: Linear,
        inputs: Tensor,
        x: Tensor,
        output_norm: RMSNorm | LayerNorm | None,
        following: NextNorm | None,
    ) -> LayerRows:
        """x and what a block adds to it whose last layer is `linear`, with the norm that follows where the device
        computes that on the way."""
        if following is not None and output_norm is None and following.may_be_left(len(x)):
            assert following.norm.kernel is not None
            deferred = linear.deferring(inputs, x, following.norm.kernel)
            if deferred is not None:
                return deferred
        return self._summed(partial(linear, inputs), x, output_norm, following)

    def _summed(
        self, block: Block, x: Tensor, output_norm: RMSNorm | LayerNorm | None, following: NextNorm | None
    ) -> Tensor | NormedRows:
        """As `_ended`, of any block."""
        if self._post_norm:
            assert output_norm is not None
            output: Tensor = output_norm(block(x))
            return output
        return summed(block, x, None if following is None else following.norm, output_norm)


def _rows_and_inputs(x: LayerRows, norm: RMSNorm | LayerNorm | None) -> tuple[Tensor, Tensor | DeferredNorm]:
    """The rows to add to, and what the next block takes: those that `norm` makes of them, if there is one."""
    if isinstance(x, Tensor):
        return x, x if norm is None else norm(x)
    return x.rows, x.normed if isinstance(x, NormedRows) else x


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


class HeadTransform(nn.Module):
    """The layers between BERT's last layer and its output head (https://arxiv.org/abs/1810.04805)."""

    def __init__(self, spec: ArchSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        size = spec.hidden_size
        self.dense = Linear(size, size, bias=True, act=spec.activation, dtype=dtype, device=device)
        self.norm = make_norm(spec.norm, size, dtype=dtype, device=device)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.norm(self.dense(hidden))
        return output


class Decoder(nn.Module):
    """A stack of layers over a flat batch and a paged cache. Parameters are empty until weights are loaded."""

    def __init__(
        self,
        spec: ArchSpec,
        backend: AttentionBackend,
        executor: LayerExecutor | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """executor: runs the layers; None: one by one."""
        super().__init__()
        self.spec = spec
        self.backend = backend
        self._executor = executor or EagerExecutor()
        self._parts: dict[tuple[int, int], LayerExecutor] = {}
        self.adapter_rows: AdapterRows | None = None
        self.dtype = dtype
        self.device = device
        kind = TiedEmbedding if spec.tied_embeddings else Embedding
        self.embed_tokens: TiedEmbedding | Embedding = kind(
            spec.vocab_size, spec.hidden_size, dtype=dtype, device=device
        )
        self.position_embeddings = (
            Embedding(spec.learned_positions, spec.hidden_size, dtype=dtype, device=device)
            if spec.learned_positions
            else None
        )
        norm = partial(make_norm, spec.norm, spec.hidden_size, dtype=dtype, device=device)
        self.embedding_norm = norm() if spec.embedding_norm else None
        rope_specs: list[RopeSpec] = []
        for rope in spec.ropes:
            if rope is not None and rope not in rope_specs:
                rope_specs.append(rope)
        self.ropes = [Rope.of(rope, device) for rope in rope_specs]
        self.layers = nn.ModuleList(
            DecoderLayer(
                spec, index, None if rope is None else rope_specs.index(rope), backend, dtype=dtype, device=device
            )
            for index, rope in enumerate(spec.ropes)
        )
        self.cross_states = self._cross_states(dtype, device) if spec.cross_size else None
        self.norm = None if spec.norms == "post" else norm()
        self.head_transform = HeadTransform(spec, dtype=dtype, device=device) if spec.head_transform else None
        self.lm_head: OutputLinear | Bias | None
        if not spec.tied_embeddings:
            self.lm_head = OutputLinear(
                spec.hidden_size, spec.vocab_size, bias=spec.head_bias, dtype=dtype, device=device
            )
        else:
            self.lm_head = Bias(spec.vocab_size, dtype=dtype, device=device) if spec.head_bias else None
        # Rounded as transformers rounds it.
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=dtype).item()

    def _cross_states(self, dtype: torch.dtype, device: torch.device) -> MergedLinear:
        """The keys and values of all layers' cross-attention come from one product."""
        parts = {
            f"layers.{index}.cross_attn.{part}": attention.num_kv_heads * attention.head_size
            for index, attention in enumerate(self.spec.attention)
            for part in ("k_proj", "v_proj")
        }
        return MergedLinear(self.spec.cross_size, parts, bias=True, dtype=dtype, device=device)

    def split_cross_states(self) -> None:
        """Before weights are loaded: have each layer make the keys and values that it attends to by itself, so that
        layers can be computed one by one. Tensors keep their names."""
        if self.cross_states is None:
            return
        for layer, attention in zip(self.layers, self.spec.attention, strict=True):
            size = attention.num_kv_heads * attention.head_size
            parts = {"k_proj": size, "v_proj": size}
            cast(DecoderLayer, layer).cross_attn.kv_proj = MergedLinear(  # type: ignore[union-attr]
                self.spec.cross_size, parts, bias=True, dtype=self.dtype, device=self.device
            )
        self.cross_states = None

    def deinterleave(self) -> None:
        """Once weights are loaded: bring the rows of queries and keys into the order in which `apply_rope` pairs them,
        where the family pairs neighbours."""
        for layer in self.layers:
            self.deinterleave_layer(cast(DecoderLayer, layer))

    def deinterleave_layer(self, layer: DecoderLayer) -> None:
        """As `deinterleave`, of one layer."""
        for own, spec, rope in self._interleaved():
            if own is layer:
                order = torch.arange(spec.head_size)
                order[: rope.size] = order[: rope.size].view(-1, 2).T.flatten()
                heads = spec.num_heads + spec.num_kv_heads
                rows = torch.arange((heads + spec.num_kv_heads) * spec.head_size)
                rotated = rows[: heads * spec.head_size].view(heads, -1)
                rotated.copy_(rotated[:, order].clone())
                layer.self_attn.qkv_proj.reorder(rows.to(self.device))

    def interleaved(self) -> list[nn.Module]:
        """The layers whose rows `deinterleave` is about to move."""
        return [layer.self_attn.qkv_proj for layer, _, _ in self._interleaved()]

    def _interleaved(self) -> Iterator[tuple[DecoderLayer, AttentionSpec, RopeSpec]]:
        for layer, spec, rope in zip(self.layers, self.spec.attention, self.spec.ropes, strict=True):
            if rope is not None and rope.interleaved:
                yield cast(DecoderLayer, layer), spec, rope

    @property
    def hidden_size(self) -> int:
        return self.spec.hidden_size

    @property
    def image_width(self) -> int:
        """See `LanguageModel.image_width`."""
        return self.spec.hidden_size * (1 + self.spec.deepstack)

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    def embed(self, token_ids: Tensor) -> Tensor:
        """``[tokens]`` int64 to ``[tokens, hidden_size]``."""
        embeddings: Tensor = self.embed_tokens(token_ids)
        return embeddings if self._embedding_scale == 1 else embeddings * self._embedding_scale

    @property
    def window(self) -> int | None:
        """How many positions a token attends to at most, itself included; None: all, in some layer, or spans are
        bidirectional."""
        if self.spec.bidirectional is not None:
            return None
        windows = [attention.window for attention in self.spec.attention if attention.window is not None]
        return max(windows) if len(windows) == len(self.spec.attention) else None

    @property
    def max_short_len(self) -> int | None:
        """Sequences of more tokens are rotated by other frequencies; None: all by the same."""
        return next((rope.switch for rope in self.spec.ropes if rope is not None), None)

    def first_position(self, prompt_len: int) -> int:
        """Where the positions of a sequence with a prompt of that length begin."""
        return next((rope.level(prompt_len) * rope.max_position for rope in self.spec.ropes if rope is not None), 0)

    @property
    def bidirectional(self) -> Bidirectional | None:
        """Which tokens of a prompt attend to each other, so that they must be computed in one step; None: none."""
        return self.spec.bidirectional

    def allocate_cache(self, num_blocks: int, block_size: int, device: torch.device | None = None) -> list[LayerCache]:
        """The KV cache of all layers, on the model's device or another one."""
        return [
            self.backend.allocate(num_blocks, block_size, attention, self.dtype, device or self.device)
            for attention in self.spec.attention
        ]

    def cache_bytes_per_block(self, block_size: int) -> int:
        """What one block costs over all layers, keys and values together."""
        return sum(self.backend.block_bytes(block_size, attention, self.dtype) for attention in self.spec.attention)

    def compute_cross_states(self, states: Tensor) -> Tensor:
        """``[states, cross_size]`` to what `CrossRows.states` are."""
        assert self.cross_states is not None
        attention = self.spec.attention[0]
        by_head: Tensor = self.cross_states(states).view(
            len(states), len(self.layers), 2, attention.num_kv_heads, attention.head_size
        )
        return by_head.permute(1, 2, 3, 0, 4).contiguous()

    def forward(
        self,
        embeddings: Tensor,
        positions: Tensor,
        metadata: BatchMetadata,
        caches: list[LayerCache],
        features: Sequence[LayerFeatures] = (),
        wanted: Tensor | None = None,
    ) -> Tensor:
        """See `LanguageModel.forward`. features: for the outputs of the first `ArchSpec.deepstack` layers."""
        if self.position_embeddings is not None:
            embeddings = embeddings + self.position_embeddings(positions)
        if self.embedding_norm is not None:
            embeddings = self.embedding_norm(embeddings)
        longest = max(*metadata.host_context_lens, metadata.num_positions)
        step = StepContext(
            metadata,
            [RopeTables(rope, positions, longest, self.dtype) for rope in self.ropes],
            self.backend.prepare(metadata, caches[0].block_size, self.spec.attention, self.dtype),
            self._query_scale(metadata, longest),
            self.adapter_rows if self.adapter_rows is not None and self.adapter_rows.active else None,
        )
        x, first, count = embeddings, 0, len(self.layers)
        for layer in range(self.spec.deepstack) if features else ():
            x, first = self._part(x, caches, step, layer, layer + 1), layer + 1
            add_features(x, features, layer)
        if wanted is None or not self._can_narrow(first):
            hidden = self._part(x, caches, step, first, count)
            return hidden if wanted is None else hidden[wanted]
        x = self._part(x, caches, step, first, count - 1)
        return self._through_layers(x, caches, step, count - 1, count, wanted)

    def _can_narrow(self, first: int) -> bool:
        """Whether a last layer is left, behind `first` others, that may compute some rows only. Cross-attention is told
        about all of them."""
        return first < len(self.layers) and not self.spec.cross_size

    def _part(self, x: Tensor, caches: Sequence[LayerCache], step: StepContext, first: int, last: int) -> Tensor:
        """Layers ``first <= i < last`` by an executor of their own, and the norm behind the last of all."""
        count = len(self.layers)
        if (first, last) == (0, count):
            return self._executor.run(self._through_layers, x, caches, step)
        if first == last < count:
            return x
        executor = self._parts.get((first, last)) or self._parts.setdefault((first, last), self._executor.for_part())
        return executor.run(partial(self._through_layers, first=first, last=last), x, caches, step)

    def _query_scale(self, metadata: BatchMetadata, longest: int) -> Tensor | None:
        """``[tokens, 1]``: see `QueryGrowth`. None: no token is beyond the context from which they grow."""
        growth = self.spec.query_growth
        if growth is None or longest <= growth.context:
            return None
        lens = zip(metadata.host_context_lens, metadata.query_lens, strict=True)
        positions = torch.cat([torch.arange(context - new, context) for context, new in lens]).double()
        if growth.beta is None:
            scales = (positions + 1).log().div(math.log(growth.context)).clamp(min=1.0)
        else:
            scales = 1 + growth.beta * (1 + (positions / growth.context).floor()).log()
        return to_device(scales[:, None].to(self.dtype), self.device)

    def _through_layers(
        self,
        x: Tensor,
        caches: Sequence[LayerCache],
        step: StepContext,
        first: int = 0,
        last: int | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Layers ``first <= i < last``, None: all others, and the norm behind the last of all. wanted: the rows that
        this one is for; None: all."""
        layers = [cast(DecoderLayer, layer) for layer in self.layers[first:last]]
        final = NextNorm.of(self.norm, None) if last in (None, len(self.layers)) else None
        followings = [*(layer.entry for layer in layers[1:]), final]
        rows: LayerRows = x
        for layer, cache, following in zip(layers, caches[first:last], followings, strict=False):
            rows = layer(rows, cache, step, wanted, following)
        if not isinstance(rows, Tensor):
            return rows.normed
        return rows if final is None or not len(rows) else final.norm(rows)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """``[rows, hidden_size]`` to float32 ``[rows, vocab_size]``; out: contiguous memory that it may take."""
        if self.head_transform is not None:
            hidden = self.head_transform(hidden)
        if isinstance(self.lm_head, OutputLinear):
            logits = self.lm_head.logits(hidden, out)
        else:
            assert isinstance(self.embed_tokens, TiedEmbedding)
            logits = self.embed_tokens.logits(hidden, out)
            if self.lm_head is not None:
                logits = self.lm_head(logits)
        if (cap := self.spec.logit_cap) is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits
