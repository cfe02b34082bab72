"""Adapters that are loaded and unloaded, and the server's health."""

from __future__ import annotations

from typing import Annotated

import msgspec
from pydantic import Field

from vlmserve.adapters.location import MAX_NAME
from vlmserve.server.schema.base import RequestModel


class LoadAdapterRequest(RequestModel):
    """The body of ``POST /v1/load_lora_adapter``.

    lora_path: of its folder, within the server's. load_inplace: whether it may replace one with that name. model: that
    it adapts; null: the only one. mixture: the X-LoRA checkpoint that is to mix it, in place of serving it; lora_name
    is then that of one of the classifier's outputs.
    """

    lora_name: Annotated[str, Field(max_length=MAX_NAME)]
    lora_path: Annotated[str, Field(max_length=4096)]
    load_inplace: bool = False
    model: str | None = None
    mixture: Annotated[str, Field(max_length=MAX_NAME)] | None = None


class UnloadAdapterRequest(RequestModel):
    """The body of ``POST /v1/unload_lora_adapter``. model: that it adapts; null: the only one. mixture: the X-LoRA
    checkpoint that is to mix it no more. lora_int_id: vLLM's; it has no effect."""

    lora_name: Annotated[str, Field(max_length=MAX_NAME)]
    model: str | None = None
    mixture: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    lora_int_id: int | None = None


class Health(msgspec.Struct, omit_defaults=True):
    """``/health`` and ``/ready``. reason: why it is not "ok"."""

    status: str
    reason: str | None = None
