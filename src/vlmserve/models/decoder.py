"""One decoder for every family: an `ArchSpec` tells it what to be. Implements `LanguageModel`."""

from __future__ import annotations

import logging
import weakref
from typing import Any, cast

import torch
from torch import Tensor, nn

from vlmserve.kernels.attention import AttentionBackend, BatchMetadata, LayerCache
from vlmserve.kernels.cpu_attention import CpuAttention
from vlmserve.kernels.cpu_program import NotRecordable, Program, Recording
from vlmserve.layers.attention import Attention, StepContext
from vlmserve.layers.linear import Embedding, GatedLinear, Linear, OutputLinear, TiedEmbedding
from vlmserve.layers.norm import RMSNorm
from vlmserve.layers.rope import Rope, RopeTables
from vlmserve.models.spec import ArchSpec

logger = logging.getLogger(__name__)


class GatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))`` (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, spec: ArchSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        parts = {"gate_proj": spec.intermediate_size, "up_proj": spec.intermediate_size}
        self.gate_up_proj = GatedLinear(
            spec.hidden_size, parts, spec.activation, bias=spec.mlp_bias, dtype=dtype, device=device
        )
        self.down_proj = Linear(
            spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias, dtype=dtype, device=device
        )

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual: added to the output."""
        output: Tensor = self.down_proj(self.gate_up_proj(x), residual)
        return output


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual. Modules are named as checkpoints name them."""

    def __init__(
        self, spec: ArchSpec, index: int, backend: AttentionBackend, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps, dtype=dtype, device=device)
        self.self_attn = Attention(
            spec.hidden_size,
            spec.attention[index],
            backend,
            qkv_bias=spec.qkv_bias,
            output_bias=spec.output_bias,
            dtype=dtype,
            device=device,
        )
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps, dtype=dtype, device=device)
        self.mlp = GatedMLP(spec, dtype=dtype, device=device)

    def forward(self, x: Tensor, cache: LayerCache, step: StepContext) -> Tensor:
        x = self.self_attn(self.input_layernorm(x), x, cache, step)
        output: Tensor = self.mlp(self.post_attention_layernorm(x), x)
        return output


class Decoder(nn.Module):
    """A stack of layers over a flat batch and a paged cache. Parameters are empty until weights are loaded."""

    def __init__(self, spec: ArchSpec, backend: AttentionBackend, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.backend = backend
        self.dtype = dtype
        self.device = device
        kind = TiedEmbedding if spec.tied_embeddings else Embedding
        self.embed_tokens: TiedEmbedding | Embedding = kind(
            spec.vocab_size, spec.hidden_size, dtype=dtype, device=device
        )
        self.layers = nn.ModuleList(
            DecoderLayer(spec, index, backend, dtype=dtype, device=device) for index in range(len(spec.attention))
        )
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, dtype=dtype, device=device)
        self.lm_head = (
            None
            if spec.tied_embeddings
            else OutputLinear(spec.hidden_size, spec.vocab_size, bias=False, dtype=dtype, device=device)
        )
        self.rope = Rope(spec.rope.frequencies(device))
        self._recorded: tuple[weakref.ref[LayerCache], Program | None] | None = None

    @property
    def hidden_size(self) -> int:
        return self.spec.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    def embed(self, token_ids: Tensor) -> Tensor:
        """``[tokens]`` int64 to ``[tokens, hidden_size]``."""
        embeddings: Tensor = self.embed_tokens(token_ids)
        return embeddings

    @property
    def window(self) -> int | None:
        """How many positions a token sees at most, itself included; None if a layer sees all of them."""
        windows = [attention.window for attention in self.spec.attention if attention.window is not None]
        return max(windows) if len(windows) == len(self.spec.attention) else None

    def allocate_cache(self, num_blocks: int, block_size: int, device: torch.device | None = None) -> list[LayerCache]:
        """The KV cache of all layers, on the model's device or another one."""
        return [
            self.backend.allocate(num_blocks, block_size, attention, self.dtype, device or self.device)
            for attention in self.spec.attention
        ]

    def cache_bytes_per_block(self, block_size: int) -> int:
        """What one block costs over all layers, keys and values together."""
        return sum(self.backend.block_bytes(block_size, attention, self.dtype) for attention in self.spec.attention)

    def forward(
        self, embeddings: Tensor, positions: Tensor, metadata: BatchMetadata, caches: list[LayerCache]
    ) -> Tensor:
        """``[tokens, hidden_size]`` and int64 positions ``[tokens]`` to final (normed) hidden states."""
        step = StepContext(
            metadata,
            RopeTables(self.rope, positions, max(metadata.host_context_lens), self.dtype),
            self.backend.prepare(metadata, caches[0].block_size),
        )
        program = self._program(caches)
        if program is not None:
            return program.run(embeddings, [step.rope.rows], step.plan)
        return self._through_layers(embeddings, caches, step)

    def _through_layers(self, x: Tensor, caches: list[LayerCache], step: StepContext) -> Tensor:
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, step)
        output: Tensor = self.norm(x)
        return output

    def _program(self, caches: list[LayerCache]) -> Program | None:
        """All layers over these caches in one call, where native kernels can do all that they do."""
        if not isinstance(self.backend, CpuAttention):
            return None
        if self._recorded is None or self._recorded[0]() is not caches[0]:
            self._recorded = weakref.ref(caches[0]), self._record(caches)
        return self._recorded[1]

    def _record(self, caches: list[LayerCache]) -> Program | None:
        recording = Recording(self.hidden_size, self.dtype)
        nothing: Any = None
        step = StepContext(nothing, cast(Any, recording.rope(self.rope.size)), nothing)
        try:
            return recording.finish(self._through_layers(recording.input, caches, step))
        except NotRecordable as error:
            logger.info("layers: a call for each kernel, because of %s", error)
            return None

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """``[rows, hidden_size]`` to float32 ``[rows, vocab_size]``; out: contiguous memory that it may take."""
        if isinstance(self.embed_tokens, TiedEmbedding):
            return self.embed_tokens.logits(hidden, out)
        assert self.lm_head is not None
        return self.lm_head.logits(hidden, out)
