"""Reads a tool call's arguments as they stream."""

from __future__ import annotations

from typing import Protocol


class ArgumentsReader(Protocol):
    def push(self, text: str) -> tuple[str, str | None]:
        """Return new JSON, and the text after the arguments; None while they have not ended."""


class JSONArguments:
    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def push(self, text: str) -> tuple[str, str | None]:
        end = next((place for place, character in enumerate(text, 1) if self._ends_with(character)), None)
        return (text, None) if end is None else (text[:end], text[end:])

    def _ends_with(self, character: str) -> bool:
        """Add a character; return whether it ends the JSON object."""
        if self._escaped:
            self._escaped = False
        elif self._in_string:
            self._escaped = character == "\\"
            self._in_string = character != '"'
        elif character == '"':
            self._in_string = True
        else:
            self._depth += (character in "{[") - (character in "}]")
            return character == "}" and self._depth == 0
        return False


def overlap(text: str, beginning: str) -> int:
    """Length of the longest end of `text` that starts `beginning`."""
    return next((n for n in range(min(len(text), len(beginning)), 0, -1) if text.endswith(beginning[:n])), 0)
