"""Parses reasoning, text and tool calls of answers, for all APIs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vlmserve.frontend.tool_parser import ContentDelta, Event, ThoughtDelta, ToolParser
from vlmserve.frontend.tools import ToolForm, ToolUse
from vlmserve.server.generation import TextDelta
from vlmserve.types import SamplingParams


class AnswerReader:
    """Before `expect`, it parses no tool calls. shows_thoughts: return reasoning."""

    def __init__(self) -> None:
        self._parsers: Sequence[ToolParser] = ()
        self.shows_thoughts = True

    def expect(
        self, form: ToolForm, tools: ToolUse | None, params: SamplingParams, num_answers: int = 1
    ) -> SamplingParams:
        """Return the sampling parameters that allow calls.

        Raises InvalidRequestError if the request's grammar conflicts with the tools.
        """
        if tools is None:
            return params
        anywhere = not tools.must_call and params.grammar is None
        self._parsers = [ToolParser(form, tools, anywhere=anywhere) for _ in range(num_answers)]
        return msgspec.structs.replace(params, grammar=form.grammar(tools, params.grammar))

    @property
    def expects_calls(self) -> bool:
        return bool(self._parsers)

    def read(self, delta: TextDelta) -> list[Event]:
        thoughts: list[Event] = [ThoughtDelta(delta.thought)] if delta.thought and self.shows_thoughts else []
        if not self._parsers:
            return [*thoughts, ContentDelta(delta.text)] if delta.text else thoughts
        parser = self._parsers[delta.index]
        return thoughts + parser.push(delta.text) + (parser.finish() if delta.finish_reason is not None else [])

    def has_called(self, index: int) -> bool:
        return bool(self._parsers) and self._parsers[index].num_calls > 0
