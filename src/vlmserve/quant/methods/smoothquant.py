"""SmoothQuant (https://arxiv.org/abs/2211.10438): divide inputs with outliers, multiply their weights."""

from __future__ import annotations

from torch import Tensor

STRENGTH = 0.5
"""The exponent a: 1 equalizes inputs, 0 equalizes columns of the weight."""


def smoothing_factors(largest_input: Tensor, weight: Tensor) -> Tensor:
    """Factors ``max|X|**a / max|W|**(1 - a)``, ``[in_features]``.

    largest_input: 0 gives factor 1. weight: ``[out_features, in_features]`` of all layers with that input.
    """
    factors = largest_input**STRENGTH / weight.abs().amax(0).clamp(min=1e-5) ** (1 - STRENGTH)
    factors[largest_input == 0] = 1
    return factors.clamp(min=1e-5)
