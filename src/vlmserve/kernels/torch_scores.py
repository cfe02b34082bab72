"""Scores of queries and keys in plain torch operations, with what the fused operator does not know."""

from __future__ import annotations

import torch
from torch import Tensor

from vlmserve.layer_specs import AttentionSpec


def needs_scores(spec: AttentionSpec) -> bool:
    """Whether something is done to scores that the fused operator does not know."""
    return spec.soft_cap is not None or spec.sinks is not None


def attention_scores(query: Tensor, keys: Tensor, spec: AttentionSpec) -> Tensor:
    """``[batch, rows, head_size]`` and ``[batch, length, head_size]`` to float32 ``[batch, rows, length]``, scaled and
    capped."""
    transposed = keys.transpose(1, 2)
    scores = torch.bmm(query, transposed)
    if query.dtype != torch.float32:
        # A product of 16-bit matrices sums in float32 but rounds its result to 16 bits, too coarse for large scores.
        # The second product finds what that rounding lost, which is cheap while the keys are still in the processor's
        # cache.
        lost = torch.baddbmm(scores, query, transposed, beta=-1)
        scores = scores.float().add_(lost)
    if spec.soft_cap is None:
        return scores.mul_(spec.scale)
    return scores.mul_(spec.scale / spec.soft_cap).tanh_().mul_(spec.soft_cap)


def attention_weights(scores: Tensor, spec: AttentionSpec) -> Tensor:
    """``[..., heads, rows, length]`` to how much of each row's attention goes where, the rest into sinks."""
    if spec.sinks is None:
        return torch.softmax(scores, -1)
    sinks = scores.new_tensor(spec.sinks)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
