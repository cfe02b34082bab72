"""``POST /v1/messages`` and ``/v1/messages/count_tokens``, for clients of Anthropic's API."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterable, Mapping

import msgspec
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from vlmserve.errors import InvalidRequestError, VLMServeError
from vlmserve.frontend.tool_parser import ContentDelta, Event, ThoughtDelta, ToolCallDelta, ToolCallStart
from vlmserve.server.cache_diagnosis import Diagnosis
from vlmserve.server.errors import json_response, messages_error_body
from vlmserve.server.generation import Generation, GenerationRequest, TextDelta
from vlmserve.server.guard import salt_of
from vlmserve.server.history import owner_of, with_files
from vlmserve.server.routes.answering import Dialect, answer
from vlmserve.server.routes.diagnosing import asked_prompt
from vlmserve.server.routes.events import named_event
from vlmserve.server.routes.reading import read
from vlmserve.server.schema.blocks import ChatMessages
from vlmserve.server.schema.content import check_continuation
from vlmserve.server.schema.messages import (
    CacheMissReason,
    CountRequest,
    Diagnostics,
    MessageAnswer,
    MessagesRequest,
    MessageUsage,
    OutputTokensDetails,
    PromptFields,
    TextContent,
    ThinkingContent,
    TokenCount,
    ToolUseContent,
)
from vlmserve.server.schema.usage import Usage
from vlmserve.server.service import Service
from vlmserve.server.tool_calls import AnswerReader
from vlmserve.types import Prompt

Block = ThinkingContent | TextContent | ToolUseContent
"""A block of an answer."""


class MessagesDialect(Dialect[MessagesRequest]):
    """Anthropic's messages. Make one for each request: it has the state of the parser."""

    kind = MessagesRequest
    id_prefix = "msg_"

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._chat = ChatMessages("", ())
        self._reader = AnswerReader()
        self._diagnosis: Diagnosis | None = None

    def num_answers(self, body: MessagesRequest) -> int:
        return 1

    async def ask(self, service: Service, body: MessagesRequest) -> GenerationRequest:
        stop = [*body.stop, *body.stop_sequences]
        named = body.model_copy(update={"stop": stop, "thinking_token_budget": body.thinking_budget})
        params = named.sampling_params(service.defaults, body.max_tokens, service.default_limit)
        tools = body.tool_use
        self._reader.shows_thoughts = body.shows_thoughts
        params = self._reader.expect(service.preparer.answers.tool_form, tools, params)
        cache_salt = body.cache_salt or ""
        self._chat = body.chat()
        if self._chat.ends_with_answer:
            check_continuation(body.grammar(), tools)
        prompt = await _prompt(service, body, self._chat, self._owner, cache_salt)
        if body.diagnostics is not None:
            asked = asked_prompt(service, body, self._owner, self._chat.messages, tools, prompt, body.processor_kwargs)
            self._diagnosis = Diagnosis(service.cache_log, asked, body.diagnostics.previous_message_id)
        self._chat.messages.clear()  # frees the media, which are prepared; an answer may take long
        return GenerationRequest([prompt], params, 1, cache_salt, tools=tools, generates=not body.prewarms)

    def reword(self, error: InvalidRequestError) -> None:
        self._chat.reword(error)
        super().reword(error)

    async def complete(self, body: MessagesRequest, generation: Generation) -> MessageAnswer:
        [said] = await generation.finished()
        cut = said.finish_reason == "length" or said.stop_string is not None
        content = _content(self._reader.read(said), cut=cut)
        found = self._diagnostics(generation, generation.usage)
        return _answer(generation, content, self._stop_reason(said), said.stop_string, found)

    async def events(self, body: MessagesRequest, generation: Generation) -> AsyncGenerator[bytes, None]:
        try:
            begun = _answer(generation, [], None, None, self._diagnostics(generation))
            yield named_event({"type": "message_start", "message": begun}) + named_event({"type": "ping"})
            blocks = BlockEvents()
            async with contextlib.aclosing(generation.deltas()) as deltas:
                async for delta in deltas:
                    events = b"".join(map(blocks.push, self._reader.read(delta)))
                    if events:
                        yield events
            end = {"stop_reason": self._stop_reason(delta), "stop_sequence": delta.stop_string}
            yield (
                blocks.finish()
                + named_event({"type": "message_delta", "delta": end, "usage": _usage(generation)})
                + named_event({"type": "message_stop"})
            )
        except VLMServeError as error:
            generation.failure = error
            yield named_event(messages_error_body(error))

    def _diagnostics(self, generation: Generation, usage: Usage | None = None) -> Diagnostics | None:
        """Return why the caches lacked a part of the prompt. usage: of the ended generation."""
        if self._diagnosis is None:
            return None
        miss = self._diagnosis.begin(generation.id, generation.model)
        if self._diagnosis.is_unknown:
            return Diagnostics(CacheMissReason("previous_message_not_found"))
        if miss is None and usage is not None:
            miss = self._diagnosis.end(usage)
        return None if miss is None else Diagnostics(CacheMissReason.of(miss))

    def _stop_reason(self, said: TextDelta) -> str:
        if said.stop_string is not None:
            return "stop_sequence"
        if said.finish_reason == "length":
            return "max_tokens"
        return "tool_use" if self._reader.has_called(said.index) else "end_turn"


class BlockEvents:
    def __init__(self) -> None:
        self._index = -1
        self._open: type[Block] | None = None

    def push(self, new: Event) -> bytes:
        match new:
            case ThoughtDelta(text):
                begun = b"" if self._open is ThinkingContent else self._begin(ThinkingContent(""))
                return begun + self._delta({"type": "thinking_delta", "thinking": text})
            case ContentDelta(text):
                begun = b"" if self._open is TextContent else self._begin(TextContent(""))
                return begun + self._delta({"type": "text_delta", "text": text})
            case ToolCallStart():
                return self._begin(_call(new))
            case ToolCallDelta(_, arguments):
                return self._delta({"type": "input_json_delta", "partial_json": arguments})

    def finish(self) -> bytes:
        return b"" if self._open is None else named_event({"type": "content_block_stop", "index": self._index})

    def _begin(self, block: Block) -> bytes:
        end = self.finish()
        self._index += 1
        self._open = type(block)
        return end + named_event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: Mapping[str, str]) -> bytes:
        return named_event({"type": "content_block_delta", "index": self._index, "delta": delta})


def _call(begun: ToolCallStart) -> ToolUseContent:
    return ToolUseContent(f"toolu_{begun.id.removeprefix('call_')}", begun.name, msgspec.Raw(b"{}"))


def _content(events: Iterable[Event], *, cut: bool) -> list[Block]:
    """Return the blocks of a complete answer. cut: a call may be incomplete."""
    content: list[Block] = []
    calls: list[ToolUseContent] = []
    inputs: list[str] = []
    for new in events:
        match new:
            case ThoughtDelta(text):
                content.append(ThinkingContent(text))
            case ContentDelta(text):
                if content and isinstance(content[-1], TextContent):
                    content[-1].text += text
                else:
                    content.append(TextContent(text))
            case ToolCallStart():
                calls.append(_call(new))
                content.append(calls[-1])
                inputs.append("")
            case ToolCallDelta(index, arguments):
                inputs[index] += arguments
    if cut and calls:
        inputs[-1] = _whole_part(inputs[-1])
    for call, arguments in zip(calls, inputs, strict=True):
        call.input = msgspec.Raw(arguments.encode())
    return content


def _whole_part(arguments: str) -> str:
    """The complete part of an incomplete JSON object. Clients parse a cut stream the same way."""
    try:
        return msgspec.json.encode(from_json(arguments, allow_partial=True)).decode()
    except ValueError:  # empty, or nested too deeply
        return "{}"


def _answer(
    generation: Generation,
    content: list[Block],
    stop_reason: str | None,
    stop_string: str | None,
    diagnostics: Diagnostics | None,
) -> MessageAnswer:
    return MessageAnswer(
        generation.id,
        generation.model,
        content,
        stop_reason,
        stop_string,
        _usage(generation),
        diagnostics=diagnostics,
        image_sizes=generation.image_sizes,
    )


def _usage(generation: Generation) -> MessageUsage:
    usage = generation.usage
    details = usage.prompt_tokens_details
    cached = details.cached_tokens
    thoughts = OutputTokensDetails(usage.completion_tokens_details.reasoning_tokens)
    return MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached, details.image_tokens, thoughts)


async def messages(request: Request) -> Response:
    """Answer a conversation in the form of Anthropic's API."""
    return await answer(request, MessagesDialect(owner_of(request)))


async def _prompt(service: Service, body: PromptFields, chat: ChatMessages, owner: str, cache_salt: str) -> Prompt:
    with service.bodies.share() as share:
        return await service.preparation.prepare(
            await with_files(service, owner, chat.messages, share),
            cache_salt=cache_salt,
            continue_final_message=chat.ends_with_answer,
            tools=body.tool_use,
            template_settings=body.template_settings(service.preparer.template_settings),
            mm_processor_kwargs=body.processor_kwargs,
        )


async def count_tokens(request: Request) -> Response:
    """Count the tokens of a conversation's prompt, with images and tools."""
    service: Service = request.app.state.service
    async with read(request, CountRequest) as body:
        service.names.check(body.model)
        chat = body.chat()
        try:
            prompt = await _prompt(service, body, chat, owner_of(request), salt_of(request, None))
        except InvalidRequestError as error:
            chat.reword(error)
            raise
        return json_response(TokenCount(len(prompt.token_ids)))
