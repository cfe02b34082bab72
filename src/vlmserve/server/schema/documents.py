from __future__ import annotations

from typing import Any

import msgspec
from pydantic import ConfigDict, Field

from vlmserve.server.schema.base import RequestModel

PREVIEW_FORM: dict[str, Any] = {
    "type": "object",
    "required": ["file"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "pages": {"type": "string", "description": "Pages from 1, such as 1-3,7,10-; all by default."},
    },
}


class PreviewRequest(RequestModel):
    """The text fields of ``POST /v1/documents/previews``."""

    model_config = ConfigDict(strict=False, extra="ignore", frozen=True, hide_input_in_errors=True)

    pages: str | None = Field(None, description="Pages from 1, such as 1-3,7,10-; all by default.")


class PagePreview(msgspec.Struct):
    page: int
    width: int
    height: int
    image: str
    """A data URL."""


class DocumentPreview(msgspec.Struct):
    """Small images of the pages that were asked for."""

    num_pages: int
    """Pages of the whole document."""
    data: list[PagePreview]
    object: str = "list"
