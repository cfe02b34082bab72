"""``POST /v1/chat/completions``: one answer, or a stream of events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from vlmserve.errors import VLMServeError
from vlmserve.frontend.tool_parser import ContentDelta, Event, ThoughtDelta, ToolCallDelta, ToolCallStart
from vlmserve.server.cache_diagnosis import Diagnosis
from vlmserve.server.confidence import AnswerConfidences
from vlmserve.server.errors import error_body
from vlmserve.server.generation import Generation, GenerationRequest, TextDelta
from vlmserve.server.history import owner_of, with_files
from vlmserve.server.routes.answering import Dialect, answer
from vlmserve.server.routes.diagnosing import asked_prompt, diagnose
from vlmserve.server.routes.events import DONE, event, usage_until_now
from vlmserve.server.schema.caching import CacheDiagnostics
from vlmserve.server.schema.chat import (
    AnswerChoice,
    AnswerMessage,
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    ChunkChoice,
    Delta,
)
from vlmserve.server.schema.content import conversation
from vlmserve.server.schema.logprobs import (
    ChoiceLogprobs,
    TokenNames,
    check_top_logprobs,
    choice_logprobs,
    prompt_logprobs,
)
from vlmserve.server.schema.tools import AnswerToolCall, DeltaToolCall, FunctionCall
from vlmserve.server.service import Service
from vlmserve.server.tool_calls import AnswerReader


class ChatDialect(Dialect[ChatRequest]):
    """OpenAI's chat completions. Make one for each request: it has the state of the parsers."""

    kind = ChatRequest
    id_prefix = "chatcmpl-"

    def __init__(self, owner: str = "") -> None:
        self._owner = owner
        self._reader = AnswerReader()
        self._uses_functions = False
        self._confidences: AnswerConfidences | None = None
        self._diagnosis: Diagnosis | None = None

    def num_answers(self, body: ChatRequest) -> int:
        return body.num_running

    async def ask(self, service: Service, body: ChatRequest) -> GenerationRequest:
        check_top_logprobs(body.top_logprobs, service.max_logprobs)
        params = body.sampling_params(service.defaults, body.token_limit, service.default_limit)
        if body.wants_confidence and not body.return_token_ids:
            self._confidences = AnswerConfidences(service.preparer.answers.token_bytes)
        cache_salt = body.cache_salt or ""
        tools = body.tool_use
        self._uses_functions = body.uses_functions
        self._reader.shows_thoughts = body.include_reasoning
        params = self._reader.expect(service.preparer.answers.tool_form, tools, params, body.n)
        with service.bodies.share() as share:
            messages = await with_files(service, self._owner, conversation(body.messages), share)
            settings = body.template_settings(service.preparer.template_settings)
            prompt = await service.preparation.prepare(
                messages,
                cache_salt=cache_salt,
                add_generation_prompt=body.add_generation_prompt is not False,
                continue_final_message=body.continues(messages[-1], tools),
                tools=tools,
                template_settings=settings,
                mm_processor_kwargs=body.processor_kwargs,
            )
        if body.prompt_cache_options is not None:
            asked = asked_prompt(service, body, self._owner, messages, tools, prompt, body.processor_kwargs)
            self._diagnosis = Diagnosis(service.cache_log, asked, body.comparison_response_id)
        if body.prediction is not None:
            prompt = await service.preparation.predict(prompt, body.prediction.text)
        return GenerationRequest(
            [prompt],
            params,
            body.n,
            cache_salt,
            body.beams,
            tools,
            body.num_samples,
            generates=not body.prewarms,
            every_token=body.return_token_ids,
        )

    async def complete(self, body: ChatRequest, generation: Generation) -> object:
        choices = [self._choice(body, answer, generation) for answer in await generation.finished()]
        completion = ChatCompletion(
            generation.id,
            generation.created,
            generation.model,
            choices,
            generation.usage,
            image_sizes=generation.image_sizes,
            prompt_cache_diagnostics=self._diagnostics(generation),
        )
        if body.prompt_logprobs is not None:
            names = TokenNames(generation.token_bytes, body.return_tokens_as_token_ids)
            completion.prompt_logprobs = prompt_logprobs(generation.prompt_logprobs(0), names)
        if body.return_token_ids:
            completion.prompt_token_ids = generation.request.prompts[0].token_ids
        return completion

    async def events(self, body: ChatRequest, generation: Generation) -> AsyncGenerator[bytes, None]:
        def chunk(
            choices: list[ChunkChoice], diagnostics: CacheDiagnostics | msgspec.UnsetType = msgspec.UNSET
        ) -> bytes:
            usage = usage_until_now(body.stream_options, generation) if choices else generation.usage
            sizes = msgspec.UNSET if choices else generation.image_sizes
            new = ChatChunk(generation.id, generation.created, generation.model, choices, usage, image_sizes=sizes)
            new.prompt_cache_diagnostics = diagnostics
            return event(new)

        try:
            beginning = Delta("assistant", None if self._reader.expects_calls else "")
            begun = ChatChunk(generation.id, generation.created, generation.model, [])
            if body.return_token_ids:
                begun.prompt_token_ids = generation.request.prompts[0].token_ids
            begun.usage = usage_until_now(body.stream_options, generation)
            for answer in generation.answers:
                begun.choices = [ChunkChoice(answer.index, beginning)]
                yield event(begun)
                begun.prompt_token_ids = msgspec.UNSET
            unsent: dict[int, list[int]] = {}
            async with contextlib.aclosing(generation.deltas()) as text_deltas:
                async for text_delta in text_deltas:
                    events = b""
                    deltas = [self._delta(new) for new in self._reader.read(text_delta)]
                    if text_delta.logprobs and all(delta.reasoning for delta in deltas):
                        deltas.append(Delta(content=""))
                    if body.return_token_ids:
                        unsent.setdefault(text_delta.index, []).extend(text_delta.token_ids)
                    first = next((place for place, delta in enumerate(deltas) if not delta.reasoning), -1)
                    for place, delta in enumerate(deltas):
                        logprobs = _logprobs(body, text_delta, generation) if place == first else None
                        token_ids = unsent.pop(text_delta.index, msgspec.UNSET)
                        events += chunk([ChunkChoice(text_delta.index, delta, logprobs=logprobs, token_ids=token_ids)])
                    confidence = self._confidence(text_delta)
                    if text_delta.finish_reason is not None:
                        reason = self._finish_reason(text_delta)
                        token_ids = unsent.pop(text_delta.index, msgspec.UNSET)
                        last = ChunkChoice(text_delta.index, Delta(), reason, None, confidence, token_ids)
                        events += chunk([last])
                    if events:
                        yield events
            diagnostics = self._diagnostics(generation)
            if body.includes_usage or diagnostics is not msgspec.UNSET:
                yield chunk([], diagnostics)
            yield DONE
        except VLMServeError as error:
            generation.failure = error
            yield event(error_body(error))

    def _diagnostics(self, generation: Generation) -> CacheDiagnostics | msgspec.UnsetType:
        return msgspec.UNSET if self._diagnosis is None else diagnose(self._diagnosis, generation)

    def _delta(self, new: Event) -> Delta:
        match new:
            case ThoughtDelta(text):
                return Delta(reasoning_content=text, reasoning=text)
            case ContentDelta(text):
                return Delta(content=text)
            case ToolCallStart(index, id_, name):
                function = FunctionCall("", name)
                call = DeltaToolCall(index, function, id_, "function")
            case ToolCallDelta(index, arguments):
                function = FunctionCall(arguments)
                call = DeltaToolCall(index, function)
        return Delta(function_call=function) if self._uses_functions else Delta(tool_calls=[call])

    def _finish_reason(self, text_delta: TextDelta) -> str:
        called = text_delta.finish_reason == "stop" and self._reader.has_called(text_delta.index)
        if not called:
            return text_delta.finish_reason or ""
        return "function_call" if self._uses_functions else "tool_calls"

    def _choice(self, body: ChatRequest, answer: TextDelta, generation: Generation) -> AnswerChoice:
        text: list[str] = []
        thoughts: list[str] = []
        calls: list[AnswerToolCall] = []
        for new in self._reader.read(answer):
            match new:
                case ThoughtDelta(thought):
                    thoughts.append(thought)
                case ContentDelta(said):
                    text.append(said)
                case ToolCallStart(_, id_, name):
                    calls.append(AnswerToolCall(id_, FunctionCall("", name)))
                case ToolCallDelta(index, arguments):
                    function = calls[index].function
                    calls[index].function = FunctionCall(f"{function.arguments}{arguments}", function.name)
        message = AnswerMessage("".join(text) if text or not calls else None)
        if thoughts:
            message.reasoning_content = message.reasoning = "".join(thoughts)
        if calls and self._uses_functions:
            message.function_call = calls[0].function
        elif calls:
            message.tool_calls = calls
        return AnswerChoice(
            answer.index,
            message,
            self._finish_reason(answer),
            _logprobs(body, answer, generation),
            self._confidence(answer),
            list(answer.token_ids) if body.return_token_ids else msgspec.UNSET,
        )

    def _confidence(self, delta: TextDelta) -> Any:
        return msgspec.UNSET if self._confidences is None else self._confidences.read(delta)


def _logprobs(body: ChatRequest, text_delta: TextDelta, generation: Generation) -> ChoiceLogprobs | None:
    if not body.logprobs:
        return None
    return choice_logprobs(
        (token.logprobs for token in text_delta.logprobs),
        TokenNames(generation.token_bytes, body.return_tokens_as_token_ids),
    )


async def chat_completions(request: Request) -> Response:
    """Answer a conversation with images, videos and documents."""
    return await answer(request, ChatDialect(owner_of(request)))
