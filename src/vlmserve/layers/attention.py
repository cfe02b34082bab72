"""Self-attention of a decoder layer: projections, rotary positions and a backend over the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vlmserve.kernels.attention import AttentionBackend, AttentionSpec, BatchMetadata, LayerCache, RotatingBackend
from vlmserve.layers.linear import Linear, MergedLinear
from vlmserve.layers.rope import RopeTables, apply_rope


@dataclass(frozen=True, slots=True)
class StepContext:
    """What all layers of one step share. plan: the backend's."""

    metadata: BatchMetadata
    rope: RopeTables
    plan: object


class Attention(nn.Module):
    """``[tokens, hidden_size]`` to the same, through one layer's cache, beside a residual."""

    def __init__(
        self,
        hidden_size: int,
        spec: AttentionSpec,
        backend: AttentionBackend,
        *,
        qkv_bias: bool,
        output_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.backend = backend
        self._rotating = backend if isinstance(backend, RotatingBackend) else None
        query_size, kv_size = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
        parts = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = MergedLinear(hidden_size, parts, bias=qkv_bias, dtype=dtype, device=device)
        self.o_proj = Linear(query_size, hidden_size, bias=output_bias, dtype=dtype, device=device)

    def forward(self, x: Tensor, residual: Tensor, cache: LayerCache, step: StepContext) -> Tensor:
        """residual: added to the output."""
        qkv = self.qkv_proj(x)
        if self._rotating is None:
            attended = self._attend(qkv, cache, step)
        else:
            attended = self._rotating.attend_rotated(qkv, step.rope.rows, cache, self.spec, step.metadata, step.plan)
        output: Tensor = self.o_proj(attended, residual)
        return output

    def _attend(self, qkv: Tensor, cache: LayerCache, step: StepContext) -> Tensor:
        spec = self.spec
        qkv = qkv.view(qkv.shape[0], -1, spec.head_size)
        # Queries and keys lie side by side and turn together.
        turned = apply_rope(qkv[:, : spec.num_heads + spec.num_kv_heads], step.rope)
        query, key = turned[:, : spec.num_heads], turned[:, spec.num_heads :]
        value = qkv[:, spec.num_heads + spec.num_kv_heads :]
        return self.backend.attend(query, key, value, cache, spec, step.metadata, step.plan)
