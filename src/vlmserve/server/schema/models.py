"""Requests to load and unload adapters, and the server's health."""

from __future__ import annotations

from typing import Annotated

import msgspec
from pydantic import Field

from vlmserve.adapters.location import MAX_NAME
from vlmserve.server.schema.base import RequestModel


class LoadAdapterRequest(RequestModel):
    """The body of ``POST /v1/load_lora_adapter``."""

    lora_name: Annotated[str, Field(max_length=MAX_NAME)]
    """The adapter's name; with `mixture`, the name of an output of the X-LoRA classifier."""
    lora_path: Annotated[str, Field(max_length=4096)]
    """The adapter's folder, within the server's."""
    load_inplace: bool = False
    """Replace a loaded adapter of the same name."""
    model: str | None = None
    """The base model; default: the only one."""
    mixture: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    """The X-LoRA checkpoint that mixes the adapter; it is not served by itself then."""


class UnloadAdapterRequest(RequestModel):
    """The body of ``POST /v1/unload_lora_adapter``."""

    lora_name: Annotated[str, Field(max_length=MAX_NAME)]
    model: str | None = None
    """The base model; default: the only one."""
    mixture: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    """The X-LoRA checkpoint to remove the adapter from."""
    lora_int_id: int | None = None
    """vLLM's field; it has no effect."""


class Health(msgspec.Struct, omit_defaults=True):
    """The response of ``/health`` and ``/ready``. reason: why the status is not "ok"."""

    status: str
    reason: str | None = None
