"""What is served, and how it is."""

from __future__ import annotations

import msgspec


class ModelCard(msgspec.Struct):
    """An entry of ``/v1/models``. max_model_len: prompt and answer together, in tokens; null while loading."""

    id: str
    created: int
    max_model_len: int | None
    object: str = "model"
    owned_by: str = "vlmserve"


class ModelList(msgspec.Struct):
    """``/v1/models``."""

    data: list[ModelCard]
    object: str = "list"


class Health(msgspec.Struct, omit_defaults=True):
    """``/health`` and ``/ready``. reason: why it is not "ok"."""

    status: str
    reason: str | None = None
