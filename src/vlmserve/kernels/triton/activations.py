"""Activation functions in Triton, by their Hugging Face names."""

from __future__ import annotations

import triton
import triton.language as tl

ACTIVATIONS = ("silu", "swish", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu")


@triton.jit
def tanh(x):
    """The sigmoid does not overflow and needs no device library."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def activate(x, NAME: tl.constexpr):
    if NAME == "silu" or NAME == "swish":
        x = x * tl.sigmoid(x)
    elif NAME == "relu":
        x = tl.where(x > 0, x, 0.0)
    elif NAME == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif NAME == "gelu_new" or NAME == "gelu_pytorch_tanh":
        x = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif NAME == "quick_gelu":
        x = x * tl.sigmoid(1.702 * x)
    return x
