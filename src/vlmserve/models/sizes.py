"""Checks a configuration's numbers before memory is allocated."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vlmserve.errors import ModelLoadError, VLMServeError

_LARGEST: Mapping[str, int] = {
    "vocab_size": 2**24, "padded_vocab_size": 2**24, "hidden_size": 2**20, "n_embd": 2**20, "intermediate_size": 2**24,
    "ffn_hidden_size": 2**24, "num_hidden_layers": 4096, "num_layers": 4096, "n_layer": 4096, "depth": 4096,
    "num_attention_heads": 2**14, "n_head": 2**14, "num_key_value_heads": 2**14, "num_heads": 2**14, "head_dim": 2**14,
    "max_position_embeddings": 2**40, "n_positions": 2**40, "embed_dim": 2**20, "patch_size": 2**12,
    "image_size": 2**16, "num_channels": 64, "linear_num_key_heads": 2**14, "linear_num_value_heads": 2**14,
    "linear_key_head_dim": 2**14, "linear_value_head_dim": 2**14, "linear_conv_kernel_dim": 2**10,
    "conv_L_cache": 2**10,
}  # fmt: skip
"""Maximum values of size settings, by name. The minimum is 1, and null means a default."""
_FACTORS = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon", "rope_theta")
"""Settings that must be positive numbers."""
_PARAMETERS_PER_BYTE = 16
"""More than any weight format has."""
_SLACK = 2**26
"""Parameters that any model may have."""


def check_sizes(config: Mapping[str, Any], source: Path) -> None:
    """Raises ModelLoadError for an impossible size. source: for messages."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            check_sizes(value, source)
        elif value is None:
            continue
        elif name in _LARGEST:
            sizes = value if isinstance(value, list) else [value]
            if not all(isinstance(size, int) and not isinstance(size, bool) for size in sizes):
                raise ModelLoadError(f"{source}: {name} is {value!r:.40}; it must be a whole number")
            if not all(0 < size <= _LARGEST[name] for size in sizes):
                raise ModelLoadError(f"{source}: {name} is {value!r:.40}; allowed are 1 to {_LARGEST[name]:,}")
        elif name in _FACTORS and not (isinstance(value, int | float) and value > 0 and math.isfinite(value)):
            raise ModelLoadError(f"{source}: {name} is {value!r:.40}; it must be a number above 0")


def check_parameters(count: int, files: Iterable[Path], source: Path) -> None:
    """Raises ModelLoadError if a model has far more parameters than its weight files can hold. source: for messages."""
    stored = sum(file.stat().st_size for file in files)
    if count > _SLACK + stored * _PARAMETERS_PER_BYTE:
        raise ModelLoadError(
            f"{source} describes {count:,} parameters, and the weight files have only {stored:,} bytes"
        )


@contextmanager
def broken(path: Path) -> Iterator[None]:
    """Convert unexpected errors, which broken or contradictory files cause, to ModelLoadError."""
    try:
        yield
    except (VLMServeError, MemoryError):
        raise
    except Exception as error:
        said = str(error).partition("\n")[0]
        raise ModelLoadError(
            f"{path} cannot be loaded: a file is broken or does not fit the others ({type(error).__name__}: {said:.80})"
        ) from error
