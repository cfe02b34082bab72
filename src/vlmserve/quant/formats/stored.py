"""The supported checkpoint formats, by ``quant_method``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vlmserve.errors import UnsupportedModelError
from vlmserve.quant.formats import awq, bitsandbytes, compressed_tensors, gptq, scaled
from vlmserve.quant.formats.layout import Layout

METHODS: dict[str, Callable[[Mapping[str, Any]], list[Layout]]] = {
    awq.METHOD: awq.layouts,
    compressed_tensors.METHOD: compressed_tensors.layouts,
    compressed_tensors.OWN_METHOD: compressed_tensors.layouts,
    gptq.METHOD: gptq.layouts,
    scaled.METHOD: scaled.layouts,
    bitsandbytes.METHOD: bitsandbytes.layouts,
}

OLD_FILES = {"quantize_config.json": gptq.METHOD, "quant_config.json": awq.METHOD}
"""Settings files of checkpoints whose config.json has no settings, with their method, which the files omit."""


def stored_layouts(config: Mapping[str, Any]) -> list[Layout]:
    """Raises UnsupportedModelError for an unsupported method or setting."""
    method = config.get("quant_method")
    if method not in METHODS:
        raise UnsupportedModelError(
            f"the checkpoint is quantized by {method!r}, which is not supported; supported are "
            f"{', '.join(METHODS)}; load the original one"
        )
    return METHODS[method](config)
