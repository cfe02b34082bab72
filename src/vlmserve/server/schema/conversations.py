"""OpenAI's ``/v1/conversations``: https://platform.openai.com/docs/api-reference/conversations"""

from __future__ import annotations

from typing import Annotated

import msgspec
from pydantic import Field

from vlmserve.server.schema.base import RequestModel
from vlmserve.server.schema.items import InputItem, Metadata

MAX_NEW_ITEMS = 20
"""Maximum items to add at once; OpenAI's limit."""

NewItems = Annotated[list[InputItem], Field(max_length=MAX_NEW_ITEMS)]


class ConversationRequest(RequestModel):
    """The body of ``POST /v1/conversations``."""

    items: NewItems = Field(default_factory=list)
    metadata: Metadata = Field(default_factory=dict)


class ConversationUpdate(RequestModel):
    """The body of ``POST /v1/conversations/{id}``."""

    metadata: Metadata = Field(default_factory=dict)


class ItemsRequest(RequestModel):
    """The body of ``POST /v1/conversations/{id}/items``."""

    items: Annotated[NewItems, Field(min_length=1)]


class ConversationObject(msgspec.Struct):
    id: str
    created_at: int
    metadata: dict[str, str]
    object: str = "conversation"
