"""Converts items that only other servers produce to known items."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from vlmserve.frontend.messages import is_too_deep
from vlmserve.server.schema.base import log_once

Item = dict[str, Any]

_LEFT_OUT = frozenset(
    "additional_tools compaction compaction_summary compaction_trigger configuration_update image_generation_call "
    "mcp_approval_request mcp_approval_response mcp_list_tools tool_search_call tool_search_output "
    "web_search_call".split()
)
"""Types of items without content for another server's model."""


_KEPT = ("id", "call_id", "status", "name", "server_label")
"""Fields with the same meaning in all items."""


def as_known(item: Item) -> Item:
    """Convert an item to a known type; an item without content becomes empty reasoning.

    The number of items stays the same, so that errors name the right one. Raises ValueError for deep nesting.
    """
    kind = item.get("type")
    if not isinstance(kind, str):
        return item
    if kind in _FORMS:
        return {name: item[name] for name in _KEPT if name in item} | _FORMS[kind](item)
    if kind in _LEFT_OUT:
        log_once("Items of type", kind, "cannot be shown to the model and are left out", logging.WARNING)
        return {"type": "reasoning"}
    return item


def as_message(item: Item) -> Item:
    """Convert to a message, or without role and content to empty reasoning."""
    if "role" in item and "content" in item:
        log_once("Items of type", item["type"], "are unknown and read as messages", logging.WARNING)
        return {**item, "type": "message"}
    log_once("Items of type", item["type"], "are unknown and left out", logging.WARNING)
    return {"type": "reasoning"}


def _call(name: str | None, *fields: str) -> Callable[[Item], Item]:
    """Convert to a call of `name`, or of the tool that the item names. The first field present has the arguments."""

    def form(item: Item) -> Item:
        field = next((field for field in fields if item.get(field) is not None), fields[0])
        arguments = item.get(field, {})
        named = {} if name is None else {"name": name}
        text = _json(arguments if isinstance(arguments, dict) else {field: arguments})
        return {"type": "function_call", "arguments": text, **named}

    return form


def _output(item: Item) -> Item:
    # local_shell_call_output names the call in `id`.
    return {
        "type": "function_call_output",
        "output": item.get("output") or "",
        "call_id": item.get("call_id") or item.get("id"),
    }


def _shell_output(item: Item) -> Item:
    return {"type": "function_call_output", "output": _texts(item.get("output"), "stdout", "stderr")}


def _screenshot(item: Item) -> Item:
    output = item.get("output")
    if isinstance(output, dict):
        output = [{**output, "type": "input_image"}]
    return {"type": "function_call_output", "output": output}


def _code(item: Item) -> Item:
    code = item.get("code") or ""
    return _ran("code_interpreter", {"code": code}, _texts(item.get("outputs"), "logs"))


def _file_search(item: Item) -> Item:
    return _ran("file_search", {"queries": item.get("queries")}, _texts(item.get("results"), "filename", "text"))


def _mcp(item: Item) -> Item:
    error = item.get("error")
    text = error if error is None or isinstance(error, str) else _json(error)
    return {"type": "mcp_call", "arguments": item.get("arguments") or "{}", "output": item.get("output"), "error": text}


def _ran(name: str, arguments: Item, output: str) -> Item:
    return {"type": "mcp_call", "name": name, "arguments": _json(arguments), "output": output}


_FORMS: Mapping[str, Callable[[Item], Item]] = {
    "apply_patch_call": _call("apply_patch", "operation"),
    "apply_patch_call_output": _output,
    "code_interpreter_call": _code,
    "computer_call": _call("computer", "action", "actions"),
    "computer_call_output": _screenshot,
    "custom_tool_call": _call(None, "input"),
    "custom_tool_call_output": _output,
    "file_search_call": _file_search,
    "local_shell_call": _call("local_shell", "action"),
    "local_shell_call_output": _output,
    "mcp_call": _mcp,
    "shell_call": _call("shell", "action"),
    "shell_call_output": _shell_output,
}
"""Types of items with content, and their conversions."""


def _json(value: Any) -> str:
    if is_too_deep([value]):
        raise ValueError("is nested too deeply")
    return json.dumps(value)


def _texts(entries: Any, *names: str) -> str:
    objects = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    found = [entry.get(name) for entry in objects for name in names]
    return "\n".join(text for text in found if isinstance(text, str) and text)
