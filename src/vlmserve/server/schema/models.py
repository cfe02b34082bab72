"""``/v1/models``."""

from __future__ import annotations

import msgspec


class ModelCard(msgspec.Struct):
    """An entry of ``/v1/models``. max_model_len: prompt and answer together, in tokens; null while loading."""

    id: str
    created: int
    max_model_len: int | None
    object: str = "model"
    owned_by: str = "vlmserve"
