"""Writes an answer of the Responses API: the items, and the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from vlmserve.frontend.tool_parser import ContentDelta, Event, ThoughtDelta, ToolCallDelta, ToolCallStart
from vlmserve.server.routes.events import named_event
from vlmserve.server.schema.items import function_call, message, output_text, reasoning, reasoning_text
from vlmserve.server.schema.responses import ResponseObject, ResponseUsage
from vlmserve.server.schema.usage import Usage
from vlmserve.types import ImageSize


class ResponseWriter:
    """Fills in a response, item by item. Methods return numbered events."""

    def __init__(self, response: ResponseObject) -> None:
        self.response = response
        self._num_events = 0
        self._item: dict[str, Any] | None = None
        """The current item, as it was at its start."""
        self._written: list[str] = []
        """Text or arguments of the current item."""
        self._logprobs: list[dict[str, Any]] = []
        """Logprobs of the current item's text."""
        self._waiting: list[dict[str, Any]] = []
        """Logprobs of tokens whose text has not arrived."""

    def begin(self, *, only_text: bool) -> bytes:
        """Return the events before the first token. only_text: no reasoning or tool calls."""
        events = self._event("response.created", response=self.response)
        events += self._event("response.in_progress", response=self.response)
        return events + self._open_message() if only_text else events

    def write(self, news: Sequence[Event], logprobs: Sequence[dict[str, Any]] = ()) -> bytes:
        """Return the events of new parts of the answer. logprobs: of its tokens, if requested."""
        events = b""
        self._waiting += logprobs
        for new in news:
            match new:
                case ThoughtDelta(text):
                    if self._item is None:
                        events += self._open(reasoning("", "in_progress"))
                        events += self._event("response.content_part.added", **self._place, part=reasoning_text(""))
                    self._written.append(text)
                    events += self._event("response.reasoning_text.delta", **self._place, delta=text)
                case ContentDelta(text):
                    if self._item is None or self._item["type"] != "message":
                        events += self._open_message()
                    self._written.append(text)
                    shown, self._waiting = self._waiting, []
                    self._logprobs += shown
                    events += self._event("response.output_text.delta", **self._place, delta=text, logprobs=shown)
                case ToolCallStart(_, call_id, name):
                    events += self._open(function_call(call_id, name, "", "in_progress"))
                case ToolCallDelta(_, arguments):
                    self._written.append(arguments)
                    events += self._event("response.function_call_arguments.delta", **self._place, delta=arguments)
        return events

    def finish(
        self, finish_reason: str | None, usage: Usage, image_sizes: list[ImageSize] | msgspec.UnsetType = msgspec.UNSET
    ) -> bytes:
        has_begun = self._item is not None or bool(self.response.output)
        is_thought = self._item is not None and self._item["type"] == "reasoning" and finish_reason != "length"
        events = self._open_message() if is_thought or not has_begun else b""
        if finish_reason == "length":
            self.response.status = "incomplete"
            self.response.incomplete_details = {"reason": "max_output_tokens"}
        else:
            self.response.status, self.response.completed_at = "completed", int(time.time())
        self.response.usage, self.response.image_sizes = ResponseUsage.of(usage), image_sizes
        return events + self._close(self.response.status)

    def finish_empty(self, usage: Usage, image_sizes: list[ImageSize] | msgspec.UnsetType = msgspec.UNSET) -> bytes:
        """Complete a response without output. Only the last event reports it."""
        self.response.status, self.response.completed_at = "completed", int(time.time())
        self.response.usage, self.response.image_sizes = ResponseUsage.of(usage), image_sizes
        return b""

    def end(self) -> bytes:
        return self._event(f"response.{self.response.status}", response=self.response)

    def fail(self, reason: str) -> bytes:
        self.response.status, self.response.completed_at = "failed", None
        self.response.error = {"code": "server_error", "message": reason}
        return self.end()

    @property
    def _place(self) -> dict[str, Any]:
        assert self._item is not None
        place = {"item_id": self._item["id"], "output_index": len(self.response.output)}
        return place if self._item["type"] == "function_call" else {**place, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._num_events += 1
        return named_event({"type": kind, "sequence_number": self._num_events - 1, **fields})

    def _open_message(self) -> bytes:
        events = self._open(message("assistant", [], "in_progress"))
        return events + self._event("response.content_part.added", **self._place, part=output_text(""))

    def _open(self, item: dict[str, Any]) -> bytes:
        events = self._close("completed")
        self._item = item
        return events + self._event("response.output_item.added", output_index=len(self.response.output), item=item)

    def _close(self, status: str) -> bytes:
        """Return the events that end the current item. status: of the answer."""
        if self._item is None:
            return b""
        text, id_ = "".join(self._written), self._item["id"]
        if self._item["type"] == "reasoning":
            item = reasoning(text, status, id_)
            events = self._event("response.reasoning_text.done", **self._place, text=text)
            events += self._event("response.content_part.done", **self._place, part=reasoning_text(text))
        elif self._item["type"] == "message":
            part = output_text(text, self._logprobs + self._waiting)
            item = message("assistant", [part], status, id_)
            events = self._event("response.output_text.done", **self._place, text=text, logprobs=part["logprobs"])
            events += self._event("response.content_part.done", **self._place, part=part)
        else:
            call_id, name = self._item["call_id"], self._item["name"]
            item = function_call(call_id, name, text, "completed" if _is_json(text) else "incomplete", id_)
            events = self._event("response.function_call_arguments.done", **self._place, name=name, arguments=text)
        events += self._event("response.output_item.done", output_index=len(self.response.output), item=item)
        self.response.output.append(item)
        self._item, self._written, self._logprobs, self._waiting = None, [], [], []
        return events


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError:
        return False
    return True
