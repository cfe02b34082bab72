"""SmoothQuant: factors that move what is hard to round from inputs to weights (https://arxiv.org/abs/2211.10438)."""

from __future__ import annotations

from torch import Tensor

STRENGTH = 0.5
"""The exponent a: 1 makes all inputs equally large, 0 all columns of the weight."""


def smoothing_factors(largest_input: Tensor, weight: Tensor) -> Tensor:
    """``max|X|**a / max|W|**(1 - a)``, ``[in_features]``: inputs are divided by them, weights multiplied.

    largest_input: the largest magnitude of each input. weight: ``[out_features, in_features]`` of all layers with that
    input. Inputs that were always zero keep a factor of 1.
    """
    factors = largest_input**STRENGTH / weight.abs().amax(0).clamp(min=1e-5) ** (1 - STRENGTH)
    factors[largest_input == 0] = 1
    return factors.clamp(min=1e-5)
