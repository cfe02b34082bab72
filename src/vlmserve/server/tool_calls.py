"""The text and the tool calls of a request's answers, for all APIs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vlmserve.frontend.tool_parser import ContentDelta, Event, ToolParser
from vlmserve.frontend.tools import ToolForm, ToolUse
from vlmserve.server.generation import TextDelta
from vlmserve.types import SamplingParams


class AnswerReader:
    """Parses the answers to one request as they come. Without a call of `expect`, all of it is text."""

    def __init__(self) -> None:
        self._parsers: Sequence[ToolParser] = ()

    def expect(
        self, form: ToolForm, tools: ToolUse | None, params: SamplingParams, num_answers: int = 1
    ) -> SamplingParams:
        """The params with which answers may call these tools, in that form.

        Raises InvalidRequestError if that does not go together with what else they have to obey.
        """
        if tools is None:
            return params
        anywhere = not tools.must_call and params.grammar is None
        self._parsers = [ToolParser(form, tools, anywhere=anywhere) for _ in range(num_answers)]
        return msgspec.structs.replace(params, grammar=form.grammar(tools, params.grammar))

    @property
    def expects_calls(self) -> bool:
        """Whether answers may call anything."""
        return bool(self._parsers)

    def read(self, delta: TextDelta) -> list[Event]:
        """The events of a delta of an answer. Each delta is read once."""
        if not self._parsers:
            return [ContentDelta(delta.text)] if delta.text else []
        parser = self._parsers[delta.index]
        return parser.push(delta.text) + (parser.finish() if delta.finish_reason is not None else [])

    def has_called(self, index: int) -> bool:
        """Whether the answer of that number has called anything so far."""
        return bool(self._parsers) and self._parsers[index].num_calls > 0
