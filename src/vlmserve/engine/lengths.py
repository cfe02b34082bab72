"""Checks that contexts fit the model and the KV cache, before torch is imported."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from vlmserve.errors import CapacityError, VLMServeError
from vlmserve.families.registry import decoder_spec, vision_family
from vlmserve.gguf.config import read_config
from vlmserve.gguf_header import read_header
from vlmserve.layer_specs import AttentionSpec, CacheBytes
from vlmserve.prompt.files import read_json
from vlmserve.settings.config import EngineConfig

SCALE_BYTES = 4
"""Bytes of the scale of a quantized key or value."""

logger = logging.getLogger(__name__)


def context_length(config: EngineConfig, max_position: int) -> int:
    """max_position: of the model. All in tokens. Raises CapacityError if the settings exceed the model."""
    if config.max_model_len is None:
        return max_position
    if config.max_model_len > max_position:
        raise CapacityError(f"--max-model-len {config.max_model_len} is more than the model's {max_position} positions")
    return config.max_model_len


def check_lengths(config: EngineConfig, of_tokens: CacheBytes, max_position: int) -> None:
    """Raise CapacityError for a context that exceeds the model or `EngineConfig.kv_cache_memory`.

    of_tokens: on each rank. max_position: of the model, in tokens.
    """
    length = context_length(config, max_position)
    if not config.kv_cache_memory:
        return
    ranks, chunk = config.tensor_parallel_size, config.max_num_batched_tokens
    tokens = of_tokens.fitting(config.kv_cache_memory // ranks // of_tokens.page, chunk, length)
    if config.max_model_len is not None and tokens < length:
        needed = of_tokens.pages(length, chunk) * of_tokens.page * ranks
        raise CapacityError(
            f"--kv-cache-memory holds {tokens:,} tokens, fewer than --max-model-len {length:,}: set it to "
            f"{needed:,} or more, or --max-model-len to less"
        )
    if not tokens:
        raise CapacityError(
            f"--kv-cache-memory {config.kv_cache_memory:,} holds no token: a block of {of_tokens.block_size} tokens "
            f"needs {of_tokens.block * ranks:,}"
        )


def check_configuration(config: EngineConfig, folder: Path) -> None:
    """Check the lengths of a checkpoint. The loader reports unreadable configurations. folder: may be a GGUF file."""
    known = _of_configuration(config, folder)
    if known is not None:
        check_lengths(config, known.of_tokens, known.max_position)


def least_embedding_bytes(config: EngineConfig, folder: Path) -> int:
    """Minimum bytes of an image token in the encoder cache; 0 if unknown. folder: see `check_configuration`."""
    known = _of_configuration(config, folder)
    return 0 if known is None else known.image_width * (4 if config.dtype == "float32" else 2)


class _Known(NamedTuple):
    of_tokens: CacheBytes
    max_position: int
    image_width: int


def _of_configuration(config: EngineConfig, folder: Path) -> _Known | None:
    try:
        values = read_config(read_header(folder)) if folder.is_file() else read_json(folder / "config.json")
        vision = vision_family(values)
        spec = decoder_spec(values if vision is None else vision.text_config(values))
        of_tokens = CacheBytes.of(spec.attention, config.block_size, lambda layer: _least_bytes(config, layer))
    except (VLMServeError, OSError, ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
        logger.debug("the contexts that %s can have are unknown: %r", folder, error)
        return None
    return _Known(of_tokens, spec.max_position, 0 if vision is None or spec.cross_size else spec.image_width)


def _least_bytes(config: EngineConfig, layer: AttentionSpec) -> int:
    """Excludes padding to whole tiles."""
    row = layer.head_size * (4 if config.dtype == "float32" else 2)
    if config.kv_cache_dtype != "auto":
        row = layer.head_size + SCALE_BYTES
    return 2 * max(1, layer.num_kv_heads // config.tensor_parallel_size) * config.block_size * row
