"""Attention scores in plain torch, with features that the fused operator lacks."""

from __future__ import annotations

import torch
from torch import Tensor

from vlmserve.layer_specs import AttentionSpec


def needs_scores(spec: AttentionSpec) -> bool:
    return spec.soft_cap is not None or spec.sinks is not None


def attention_scores(query: Tensor, keys: Tensor, spec: AttentionSpec) -> Tensor:
    """Scaled and capped float32 scores ``[batch, rows, length]``.

    query: ``[batch, rows, head_size]``. keys: ``[batch, length, head_size]``.
    """
    transposed = keys.transpose(1, 2)
    scores = torch.bmm(query, transposed)
    if query.dtype != torch.float32:
        # 16-bit results are too coarse for large scores. A second matmul computes the rounding error, while the keys
        # are in the processor's cache.
        lost = torch.baddbmm(scores, query, transposed, beta=-1)
        scores = scores.float().add_(lost)
    if spec.soft_cap is None:
        return scores.mul_(spec.scale)
    return scores.mul_(spec.scale / spec.soft_cap).tanh_().mul_(spec.soft_cap)


def attention_weights(scores: Tensor, spec: AttentionSpec) -> Tensor:
    """Softmax of ``[..., heads, rows, length]``. Sinks take the rest."""
    if spec.sinks is None:
        return torch.softmax(scores, -1)
    sinks = scores.new_tensor(spec.sinks)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
