"""Activation functions, by their names in Hugging Face configs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmserve.errors import UnsupportedModelError

Activation = Callable[[Tensor], Tensor]


def quick_gelu(x: Tensor) -> Tensor:
    """CLIP's approximation of GELU."""
    return x * torch.sigmoid(1.702 * x)


_gelu_tanh = partial(F.gelu, approximate="tanh")

ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": quick_gelu,
}


def activation(name: str) -> Activation:
    """Raises UnsupportedModelError for an unknown name."""
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(f"activation {name!r} is not supported; known are {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]
