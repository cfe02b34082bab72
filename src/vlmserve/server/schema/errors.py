"""Errors, as OpenAI and as Anthropic write them."""

from __future__ import annotations

import msgspec


class ErrorDetail(msgspec.Struct):
    """What went wrong. param: the field that it is about. code: a stable word for machines."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(msgspec.Struct):
    """The body of an error response."""

    error: ErrorDetail


class MessagesErrorDetail(msgspec.Struct):
    """What went wrong. details: for clients that know what to do then."""

    type: str
    message: str
    details: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class MessagesErrorAnswer(msgspec.Struct):
    """The same in Anthropic's form."""

    error: MessagesErrorDetail
    type: str = "error"
