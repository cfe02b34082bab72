"""The decoder of all families, configured by an `ArchSpec`. Implements `LanguageModel`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Unpack

import torch
from torch import Tensor, nn

from vlmserve.devices.device import EagerExecutor, LayerExecutor
from vlmserve.families.spec import ArchSpec, QueryGrowth
from vlmserve.kernels.adapters import AdapterRows
from vlmserve.kernels.attention import AttentionBackend, BatchMetadata, LayerCache
from vlmserve.kernels.blocks import allocate_layers
from vlmserve.kernels.states import StateCache
from vlmserve.kernels.transfers import to_device
from vlmserve.layer_specs import AttentionSpec, CacheBytes, CacheLayout, RopeSpec, StateSpec
from vlmserve.layers.layer import Factory
from vlmserve.layers.linear import Bias, Embedding, Linear, OutputLinear, TiedEmbedding
from vlmserve.layers.norm import UnitNorm
from vlmserve.layers.residual import ResidualStream
from vlmserve.layers.rope import Rope, RopeTables
from vlmserve.layers.step import StepContext
from vlmserve.models.blocks.block import make_norm
from vlmserve.models.blocks.cross import CrossAttention, CrossStates
from vlmserve.models.blocks.per_layer import PerLayerEmbeddings
from vlmserve.models.decoder_layer import DecoderLayer
from vlmserve.models.image_rows import LayerFeatures, add_features
from vlmserve.models.mtp import MTPLayer
from vlmserve.types import Bidirectional


class HeadTransform(nn.Module):
    """The layers between BERT's last layer and its output head (https://arxiv.org/abs/1810.04805)."""

    def __init__(self, spec: ArchSpec, **factory: Unpack[Factory]) -> None:
        super().__init__()
        size = spec.hidden_size
        self.dense = Linear(size, size, bias=True, act=spec.activation, **factory)
        self.norm = make_norm(spec.norm, size, **factory)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.norm(self.dense(hidden))
        return output


class Decoder(nn.Module):
    """Decoder layers over a flat batch and a paged cache. Parameters are empty until weights are loaded."""

    def __init__(
        self,
        spec: ArchSpec,
        backend: AttentionBackend,
        executor: LayerExecutor | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.hidden_size, self.vocab_size = spec.hidden_size, spec.vocab_size
        self.grid_positions = any(rope is not None and "mrope_section" in rope.parameters for rope in spec.ropes)
        self.backend = backend
        self.executor = executor or EagerExecutor()
        self._parts: dict[tuple[int, int], LayerExecutor] = {}
        self.adapter_rows: AdapterRows | None = None
        self.state_specs: Sequence[StateSpec] = spec.states
        self._attention = spec.attention
        self.dtype = dtype
        self.device = device
        kind = TiedEmbedding if spec.tied_embeddings else Embedding
        self.embed_tokens: TiedEmbedding | Embedding = kind(
            spec.vocab_size, spec.hidden_size, dtype=dtype, device=device
        )
        self.token_norm = (
            None if spec.token_norm_eps is None else UnitNorm(spec.hidden_size, spec.token_norm_eps, device=device)
        )
        self.per_layer = (
            None if spec.per_layer is None else PerLayerEmbeddings(spec, spec.per_layer, dtype=dtype, device=device)
        )
        self.position_embeddings = (
            Embedding(spec.learned_positions, spec.hidden_size, dtype=dtype, device=device)
            if spec.learned_positions
            else None
        )
        norm = partial(make_norm, spec.norm, spec.hidden_size, dtype=dtype, device=device)
        self.embedding_norm = norm() if spec.embedding_norm else None
        rope_specs = _distinct(spec.ropes)
        self.ropes = [Rope.of(rope, device) for rope in rope_specs]
        rope_numbers = [None if rope is None else rope_specs.index(rope) for rope in spec.ropes]
        self.layers = nn.ModuleList(
            DecoderLayer(spec, index, number, backend, dtype=dtype, device=device)
            for index, number in enumerate(rope_numbers)
        )
        self.cross_states = CrossStates(spec, dtype=dtype, device=device) if spec.cross_size else None
        self.norm = None
        if spec.norms != "post":
            self.norm = make_norm(spec.final_norm or spec.norm, spec.hidden_size, dtype=dtype, device=device)
        self.mtp: MTPLayer | None = None
        if spec.mtp:
            self.mtp = MTPLayer(spec, rope_numbers[spec.last_attention], backend, dtype=dtype, device=device)
        self.head_transform = HeadTransform(spec, dtype=dtype, device=device) if spec.head_transform else None
        self.lm_head: OutputLinear | Bias | None = _lm_head(spec, dtype=dtype, device=device)
        self._embedding_scale = spec.embedding_scale
        if spec.rounds_embedding_scale:
            self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=dtype).item()

    def split_cross_states(self) -> None:
        """Let each layer compute its own cross-attention keys and values. Call it before weights are loaded."""
        for block in self.modules():
            if isinstance(block, CrossAttention):
                block.own_states(self.spec.cross_size)
        self.cross_states = None

    @property
    def image_width(self) -> int:
        return self.spec.image_width

    def embed(self, token_ids: Tensor) -> Tensor:
        embeddings: Tensor = self.embed_tokens(token_ids)
        if self.token_norm is not None:
            embeddings = self.token_norm(embeddings)
        embeddings = embeddings if self._embedding_scale == 1 else embeddings * self._embedding_scale
        return embeddings if self.per_layer is None else torch.cat((embeddings, self.per_layer.of_tokens(token_ids)), 1)

    @property
    def cache_layout(self) -> CacheLayout:
        return CacheLayout.of(self.spec.attention)

    @property
    def max_short_len(self) -> int | None:
        return next((rope.switch for rope in self.spec.ropes if rope is not None), None)

    def first_position(self, prompt_len: int) -> int:
        return next((rope.level(prompt_len) * rope.max_position for rope in self.spec.ropes if rope is not None), 0)

    @property
    def bidirectional(self) -> Bidirectional | None:
        return self.spec.bidirectional

    def allocate_cache(
        self, num_blocks: int, block_size: int, device: torch.device | None = None, layout: CacheLayout | None = None
    ) -> list[LayerCache]:
        def allocate(spec: AttentionSpec) -> LayerCache:
            return self.backend.allocate(num_blocks, block_size, spec, self.dtype, device or self.device)

        return allocate_layers(self.spec.attention, allocate, layout)

    def cache_bytes(self, block_size: int) -> CacheBytes:
        return CacheBytes.of(
            self.spec.attention, block_size, lambda spec: self.backend.block_bytes(block_size, spec, self.dtype)
        )

    def forward(
        self,
        embeddings: Tensor,
        positions: Tensor,
        metadata: BatchMetadata,
        caches: list[LayerCache],
        features: Sequence[LayerFeatures] = (),
        wanted: Tensor | None = None,
        states: Sequence[StateCache] = (),
    ) -> Tensor:
        if self.position_embeddings is not None:
            embeddings = embeddings + self.position_embeddings(positions)
        if self.embedding_norm is not None:
            embeddings = self.embedding_norm(embeddings)
        step = self._step(positions, metadata, caches, states)
        if self.per_layer is not None:
            inputs, of_tokens = _divided(embeddings, self.hidden_size)
            embeddings = torch.cat((inputs, self.per_layer(inputs, of_tokens)), 1)
        if not features and wanted is None:
            return self.executor.run(self.through_layers, embeddings, caches, step)
        if self.spec.first_sharing is not None and wanted is not None and metadata.wanted is not None:
            return self._narrowed(embeddings, positions, caches, step, self.spec.first_sharing, wanted)
        x, first, count = embeddings, 0, len(self.layers)
        for layer in range(self.spec.deepstack) if features else ():
            x, first = self._part(x, caches, step, layer, layer + 1), layer + 1
            add_features(x, features, layer)
        # Cross-attention needs all rows.
        if wanted is None or len(wanted) == len(x) or first == count or self.spec.cross_size:
            hidden = self._part(x, caches, step, first, count)
            return hidden if wanted is None else hidden[wanted]
        x = self._part(x, caches, step, first, count - 1)
        return self.through_layers(x, caches, step, count - 1, count, wanted)

    def predict(
        self,
        embeddings: Tensor,
        hidden: Tensor,
        positions: Tensor,
        metadata: BatchMetadata,
        caches: list[LayerCache],
        wanted: Tensor,
    ) -> Tensor:
        assert self.mtp is not None
        step = self._step(positions, metadata, caches, ())
        states: Tensor = self.mtp(embeddings, hidden, caches, step, wanted)
        return states

    def _step(
        self, positions: Tensor, metadata: BatchMetadata, caches: Sequence[LayerCache], states: Sequence[StateCache]
    ) -> StepContext:
        longest, growth = max(*metadata.host_context_lens, metadata.num_positions), self.spec.query_growth
        return StepContext(
            metadata,
            [RopeTables(rope, positions, longest, self.dtype) for rope in self.ropes],
            self.backend.prepare(metadata, caches[0].block_size, self._attention, self.dtype),
            None if growth is None else _query_scale(growth, metadata, longest, self.dtype, self.device),
            self.adapter_rows if self.adapter_rows is not None and self.adapter_rows.active else None,
            states,
        )

    def _narrowed(
        self,
        x: Tensor,
        positions: Tensor,
        caches: Sequence[LayerCache],
        step: StepContext,
        first: int,
        wanted: Tensor,
    ) -> Tensor:
        """Layers from `first` on write no keys and values, so they compute only the wanted rows."""
        rows = self._part(x, caches, step, 0, first)[wanted]
        if not len(wanted):
            return rows[:, : self.hidden_size]
        if step.adapters is not None:
            step.adapters.narrow(wanted)
        last = self._step(positions[..., wanted], step.metadata.of_last_rows(wanted), caches, step.states)
        return self._part(rows, caches, last, first, len(self.layers))

    def _part(self, x: Tensor, caches: Sequence[LayerCache], step: StepContext, first: int, last: int) -> Tensor:
        """Run layers ``first <= i < last`` with their own executor."""
        count = len(self.layers)
        if (first, last) == (0, count):
            return self.executor.run(self.through_layers, x, caches, step)
        if first == last < count:
            return x
        executor = self._parts.get((first, last)) or self._parts.setdefault((first, last), self.executor.for_part())
        rows = executor.run(partial(self.through_layers, first=first, last=last), x, caches, step)
        if last == count or self.per_layer is None:
            return rows
        return torch.cat((rows, x[:, self.hidden_size :]), 1)

    def through_layers(
        self,
        x: Tensor,
        caches: Sequence[LayerCache],
        step: StepContext,
        first: int = 0,
        last: int | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """wanted: rows that the last layer must compute. None: all."""
        rows, embeddings = (x, None) if self.per_layer is None else _divided(x, self.hidden_size)
        stream = self._stream(rows)
        for layer in list(self.layers)[first:last]:
            layer(stream, caches, step, wanted, embeddings)
        is_end = last in (None, len(self.layers))
        return stream.normed(self.norm) if is_end and (wanted is None or len(wanted)) else stream.rows

    def through_layer(self, index: int, x: Tensor, caches: Sequence[LayerCache], step: StepContext) -> Tensor:
        stream = self._stream(x)
        self.layers[index](stream, caches, step)
        return stream.rows

    def _stream(self, x: Tensor) -> ResidualStream:
        return ResidualStream(x, post_norm=self.spec.norms == "post")

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        if self.head_transform is not None:
            hidden = self.head_transform(hidden)
        if isinstance(self.lm_head, OutputLinear):
            logits = self.lm_head.logits(hidden, out)
        else:
            assert isinstance(self.embed_tokens, TiedEmbedding)
            logits = self.embed_tokens.logits(hidden, out)
            if self.lm_head is not None:
                logits = self.lm_head(logits)
        if (scale := self.spec.logit_scale) != 1:
            logits.mul_(scale)
        if (cap := self.spec.logit_cap) is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits


def _lm_head(spec: ArchSpec, **factory: Unpack[Factory]) -> OutputLinear | Bias | None:
    if not spec.tied_embeddings:
        return OutputLinear(spec.hidden_size, spec.vocab_size, bias=spec.head_bias, **factory)
    return Bias(spec.vocab_size, **factory) if spec.head_bias else None


def _distinct(ropes: Sequence[RopeSpec | None]) -> list[RopeSpec]:
    found: list[RopeSpec] = []
    for rope in ropes:
        if rope is not None and rope not in found:
            found.append(rope)
    return found


def _query_scale(
    growth: QueryGrowth, metadata: BatchMetadata, longest: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Return factors of queries, ``[tokens, 1]``; None if no token is beyond `growth.context`.

    With ``pos`` from 0: ``max(1, log(pos + 1) / log(context))``, or with `beta`: ``1 + beta * ln(1 + floor(pos /
    context))``.
    """
    if longest <= growth.context:
        return None
    lens = zip(metadata.host_context_lens, metadata.query_lens, strict=True)
    positions = torch.cat([torch.arange(context - new, context) for context, new in lens]).double()
    if growth.beta is None:
        scales = (positions + 1).log().div(math.log(growth.context)).clamp(min=1.0)
    else:
        scales = 1 + growth.beta * (1 + (positions / growth.context).floor()).log()
    return to_device(scales[:, None].to(dtype), device)


def _divided(x: Tensor, hidden_size: int) -> tuple[Tensor, Tensor]:
    return x[:, :hidden_size].contiguous(), x[:, hidden_size:]
