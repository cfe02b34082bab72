"""Converts items to chat messages, and errors about the messages back to items."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from vlmserve.errors import InvalidRequestError
from vlmserve.media.budget import BUDGET_FIELDS
from vlmserve.server.schema.content import thoughts_of

Item = dict[str, Any]
Message = dict[str, Any]

_PLACE = re.compile(r"messages\[(\d{1,9})\]((?:\.\w+|\[\d+\])*)")
_CALL = re.compile(r"\.tool_calls\[(\d{1,9})\](?:\.function)?")
_INSTRUCTIONS, _EARLIER = "instructions", "an earlier turn"


class Turns:
    """Chat messages of items, after the system message.

    An answer's reasoning, text and following calls become one message, without calls that were cut off.

    before, new: items of earlier turns and of this request. Raises InvalidRequestError without any message, and for a
    result without its call.
    """

    def __init__(self, instructions: str | None, before: Sequence[Item], new: Sequence[Item]) -> None:
        self.messages: list[Message] = []
        self._sources: list[str] = []
        self._call_sources: list[list[str]] = []
        self._called: set[str] = set()
        self._thoughts = ""
        """Reasoning to attach to the assistant's next message."""
        if instructions:
            self._add({"role": "system", "content": instructions}, _INSTRUCTIONS)
        for item in before:
            self._add_item(item, _EARLIER)
        for index, item in enumerate(new):
            self._add_item(item, f"input[{index}]")
        if not self.messages:
            raise InvalidRequestError("input has nothing that the model can read; add a message", param="input")

    def reword(self, error: InvalidRequestError) -> None:
        error.args = (_PLACE.sub(self._reworded, str(error)),)
        if error.param is not None:
            renamed = _PLACE.sub(self._reworded, error.param)
            error.param = "input" if renamed in ("messages", _EARLIER) else renamed

    def _add(self, message: Message, source: str) -> None:
        if message["role"] == "assistant":
            message |= thoughts_of(self._thoughts)
        self._thoughts = ""
        self.messages.append(message)
        self._sources.append(source)
        self._call_sources.append([])

    def _add_item(self, item: Item, source: str) -> None:
        match item["type"]:
            case "function_call":
                if item["status"] != "incomplete":
                    self._add_call(item, source)
            case "function_call_output":
                self._check_called(item, source)
                content = _content(item["output"])
                self._add({"role": "tool", "tool_call_id": item["call_id"], "content": content}, source)
            case "mcp_call":
                self._add_call({**item, "call_id": item["id"]}, source)
                self._add(
                    {"role": "tool", "tool_call_id": item["id"], "content": item["output"] or item["error"] or ""},
                    source,
                )
            case "reasoning":
                self._thoughts += "".join(part["text"] for part in item["content"])
            case _:
                self._add(_said(item), source)

    def _add_call(self, item: Item, source: str) -> None:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self._add({"role": "assistant", "content": ""}, source)
        if self._thoughts:
            before = self.messages[-1].get("reasoning_content", "")
            self.messages[-1]["reasoning_content"] = f"{before}\n\n{self._thoughts}" if before else self._thoughts
            self._thoughts = ""
        function = {"name": item["name"], "arguments": item["arguments"]}
        self.messages[-1].setdefault("tool_calls", []).append(
            {"id": item["call_id"], "type": "function", "function": function}
        )
        self._call_sources[-1].append(source)
        self._called.add(item["call_id"])

    def _check_called(self, item: Item, source: str) -> None:
        call_id = item["call_id"]
        if call_id in self._called:
            return
        if source == _EARLIER:
            raise InvalidRequestError(
                f"an earlier turn has the output {item['id']!r} of the call {call_id!r:.100}, which is not there; "
                "delete that output",
                param="input",
            )
        raise InvalidRequestError(
            f"{source}.call_id: no function_call that is complete and has the call_id {call_id!r:.100} comes before it",
            param=f"{source}.call_id",
        )

    def _reworded(self, match: re.Match[str]) -> str:
        index, path = int(match[1]), match[2]
        if index >= len(self.messages):
            return match[0]  # the text is the user's own
        source, calls = self._sources[index], self._call_sources[index]
        if (call := _CALL.match(path)) and int(call[1]) < len(calls):
            source, path = calls[int(call[1])], path[call.end() :]
        elif self.messages[index]["role"] == "tool":
            path = path.replace(".content", ".output", 1).replace(".tool_call_id", ".call_id")
        if source in (_INSTRUCTIONS, _EARLIER):
            return source
        return source + path.replace(".image_url.url", ".image_url").replace(".file.file_", ".file_")


def _said(item: Item) -> Message:
    role = "system" if item["role"] == "developer" else item["role"]
    content = _content(item["content"])
    if role == "assistant" and isinstance(content, list) and all(part["type"] == "text" for part in content):
        content = "".join(part["text"] for part in content)
    return {"role": role, "content": content}


def _content(said: str | list[Item]) -> str | list[Item]:
    if isinstance(said, str):
        return said
    parts = [_chat_part(part) for part in said]
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _chat_part(part: Item) -> Item:
    match part["type"]:
        case "input_text" | "output_text":
            return {"type": "text", "text": part["text"]}
        case "refusal":
            return {"type": "text", "text": part["refusal"]}
    limits: dict[str, Any] = {name: part[name] for name in BUDGET_FIELDS if name in part}
    detail = {"detail": part["detail"]} if "detail" in part else {}
    limits |= {"pages": part["pages"]} if "pages" in part else {}
    for name in ("file_id", "file_data", "file_url"):
        if name in part:
            return {"type": "file", "file": {name: part[name], **detail}, **limits}
    return {"type": "image_url", "image_url": {"url": part["image_url"], **detail}, **limits}
