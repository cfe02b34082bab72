"""Parses tool calls in an answer's text as it streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal
from uuid import uuid4

from vlmserve.frontend.tools import ArgumentsReader, ToolForm, ToolUse, overlap


@dataclass(frozen=True)
class ContentDelta:
    text: str


@dataclass(frozen=True)
class ThoughtDelta:
    text: str


@dataclass(frozen=True)
class ToolCallStart:
    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of arguments, as JSON."""

    index: int
    arguments: str


Event = ThoughtDelta | ContentDelta | ToolCallStart | ToolCallDelta


class ToolParser:
    """Reads one answer, which obeys a `ToolForm`'s grammar and may be cut off.

    anywhere: text may precede the first call. num_calls: calls begun so far.
    """

    def __init__(self, form: ToolForm, use: ToolUse, *, anywhere: bool) -> None:
        self._form = form
        self._heads = {form.head(function): function for function in use.callable}
        self._reader: ArgumentsReader | None = None
        self._trigger = form.trigger
        self._id_length = form.call_id_length
        self._anywhere = anywhere and bool(form.trigger)
        self._state: Literal["text", "plain", "between", "head", "arguments"] = "text"
        self._held = ""
        self._said = False
        self.num_calls = 0

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        self._held += text
        while self._held:
            state, held = self._state, self._held
            events += _STATES[state](self)
            if (self._state, self._held) == (state, held):
                break
        return events

    def finish(self) -> list[Event]:
        """Return text held back as a possible beginning of a call."""
        rest, self._held = self._held, ""
        return [ContentDelta(rest)] if rest and self._state == "text" else []

    def _read_text(self) -> list[Event]:
        if not self._anywhere:
            return self._read_beginning()
        place = self._held.find(self._trigger)
        if place >= 0:
            text, self._held = self._held[:place], self._held[place + len(self._trigger) :]
            self._state = "between"
            return self._say(text) if self._said or text.strip() else []
        sure = len(self._held) - overlap(self._held, self._trigger)
        if not self._said and not self._held[:sure].strip():
            return []
        text, self._held = self._held[:sure], self._held[sure:]
        return self._say(text)

    def _read_beginning(self) -> list[Event]:
        """Decide from the first characters whether calls follow."""
        beginnings = [self._trigger] if self._trigger else list(self._heads)
        for beginning in beginnings:
            if self._held.startswith(beginning):
                self._state = "between" if self._trigger else "head"
                self._held = self._held.removeprefix(self._trigger)
                return []
        if not any(beginning.startswith(self._held) for beginning in beginnings):
            self._state = "plain"
        return []

    def _read_plain(self) -> list[Event]:
        text, self._held = self._held, ""
        return self._say(text)

    def _read_between(self) -> list[Event]:
        start = self._form.call_start
        place = self._held.find(start)
        self._held = self._held[place if place >= 0 else len(self._held) - overlap(self._held, start) :]
        self._state = "head" if place >= 0 else "between"
        return []

    def _read_head(self) -> list[Event]:
        for head, function in self._heads.items():
            if self._held.startswith(head):
                self._held = self._held[len(head) :]
                self._state, self._reader = "arguments", self._form.reader(function)
                self.num_calls += 1
                return [ToolCallStart(self.num_calls - 1, self._call_id(), function.name)]
        return []

    def _read_arguments(self) -> list[Event]:
        assert self._reader is not None
        arguments, rest = self._reader.push(self._held)
        self._state = "arguments" if rest is None else "between"
        self._held = rest or ""
        return [ToolCallDelta(self.num_calls - 1, arguments)] if arguments else []

    def _say(self, text: str) -> list[Event]:
        self._said = self._said or bool(text)
        return [ContentDelta(text)] if text else []

    def _call_id(self) -> str:
        return uuid4().hex[: self._id_length] if self._id_length else f"call_{uuid4().hex}"


_STATES: dict[str, Callable[[ToolParser], list[Event]]] = {
    "text": ToolParser._read_text,
    "plain": ToolParser._read_plain,
    "between": ToolParser._read_between,
    "head": ToolParser._read_head,
    "arguments": ToolParser._read_arguments,
}
