"""OpenAI's ``/v1/files``: https://platform.openai.com/docs/api-reference/files"""

from __future__ import annotations

from typing import Literal

import msgspec
from pydantic import ConfigDict, Field

from vlmserve.server.schema.base import RequestModel

MAX_NAME = 255
"""Maximum characters of a file's name."""

Purpose = Literal["vision", "user_data", "assistants", "batch"]


class FileRequest(RequestModel):
    """The text fields of ``POST /v1/files``."""

    model_config = ConfigDict(strict=False, extra="ignore", frozen=True, hide_input_in_errors=True)

    purpose: Purpose
    lifetime: int | None = Field(None, alias="expires_after[seconds]", ge=3600, le=2592000)
    anchor: Literal["created_at"] | None = Field(None, alias="expires_after[anchor]")


class FileObject(msgspec.Struct):
    id: str
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"
    status_details: None = None
