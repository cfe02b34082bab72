"""Quotes users' messages and JSON, so that nothing in them becomes a control token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vlmserve.prompt.template import Message, ToolCall
from vlmserve.prompt.untrusted import Quotation


def quoted_message(message: Message, quotation: Quotation) -> Message:
    parts = (quotation.quote(part) if isinstance(part, str) else part for part in message.parts)
    calls = [
        ToolCall(*(quoted_json(value, quotation) for value in (call.id, call.name, call.arguments)))
        for call in message.tool_calls
    ]
    call_id, name, reasoning = (
        value and quotation.quote(value) for value in (message.tool_call_id, message.name, message.reasoning)
    )
    return replace(
        message, parts=tuple(parts), tool_calls=tuple(calls), tool_call_id=call_id, name=name, reasoning=reasoning
    )


def quoted_json(value: Any, quotation: Quotation) -> Any:
    if isinstance(value, str):
        return quotation.quote(value)
    if isinstance(value, dict):
        return {quotation.quote(key): quoted_json(item, quotation) for key, item in value.items()}
    if isinstance(value, list):
        return [quoted_json(item, quotation) for item in value]
    return value
