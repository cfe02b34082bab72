"""Errors in the forms of OpenAI and Anthropic."""

from __future__ import annotations

import msgspec


class ErrorDetail(msgspec.Struct):
    """An error. param: the field. code: stable, for programs."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(msgspec.Struct):
    error: ErrorDetail


class MessagesErrorDetail(msgspec.Struct):
    """An error in Anthropic's form. details: for clients that act on them."""

    type: str
    message: str
    details: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class MessagesErrorAnswer(msgspec.Struct):
    """The body of an error response in Anthropic's form."""

    error: MessagesErrorDetail
    type: str = "error"
