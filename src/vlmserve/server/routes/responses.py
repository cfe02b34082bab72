"""``POST /v1/responses``: answers that may continue earlier ones and are stored."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator, Awaitable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from vlmserve.errors import InvalidRequestError, NotFoundError, VLMServeError
from vlmserve.frontend.tools import ToolUse
from vlmserve.server.body import BodyShare
from vlmserve.server.cache_diagnosis import Diagnosis
from vlmserve.server.confidence import AnswerConfidences
from vlmserve.server.generation import Generation, GenerationRequest, TextDelta
from vlmserve.server.history import file_ids, fitting, kept_items, needed_store, owner_of, read_items, with_files
from vlmserve.server.routes.answering import Dialect, answer
from vlmserve.server.routes.diagnosing import asked_prompt, diagnose
from vlmserve.server.routes.response_writer import ResponseWriter
from vlmserve.server.schema.logprobs import TokenNames, check_top_logprobs, choice_logprobs
from vlmserve.server.schema.responses import ResponseObject, ResponsesRequest
from vlmserve.server.service import Service
from vlmserve.server.tool_calls import AnswerReader
from vlmserve.server.turns import Turns
from vlmserve.storage.items import PackedItem, StoredItem
from vlmserve.storage.store import Store
from vlmserve.types import Prompt, SamplingParams

_FUNCTION = re.compile(r"(tools\[\d+\])\.function\b")


class ResponsesDialect(Dialect[ResponsesRequest]):
    """OpenAI's responses. Make one for each request. store: None without a history."""

    kind = ResponsesRequest
    id_prefix = "resp_"
    content_field = "input"

    def __init__(self, service: Service, owner: str) -> None:
        self._store = service.store
        self._share: BodyShare = BodyShare(service.bodies)
        self._owner = owner
        self._params = SamplingParams()
        self._reader = AnswerReader()
        self._inputs: list[PackedItem] = []
        self._file_ids: list[str] = []
        self._confidences: AnswerConfidences | None = None
        self._diagnosis: Diagnosis | None = None

    def num_answers(self, body: ResponsesRequest) -> int:
        return 1

    async def ask(self, service: Service, body: ResponsesRequest) -> GenerationRequest:
        if body.store and self._store is None:
            raise InvalidRequestError("This server stores no history; leave store out", param="store")
        check_top_logprobs(body.top_logprobs, service.max_logprobs)
        params = body.sampling_params(service.defaults, body.max_output_tokens, service.default_limit)
        if body.wants_confidence:
            self._confidences = AnswerConfidences(service.preparer.answers.token_bytes)
        tools = body.tool_use
        self._params = self._reader.expect(service.preparer.answers.tool_form, tools, params)
        cache_salt = body.cache_salt or ""
        with service.bodies.share() as share:
            before = await self._items_before(service, body, share)
            new = await kept_items(service, self._owner, body.input, share)
            turns = Turns(body.instructions, before, new)
            prompt = await self._prepare(service, body, turns, tools, share)
            asked = asked_prompt(service, body, self._owner, turns.messages, tools, prompt, body.processor_kwargs)
        self._diagnosis = Diagnosis(service.cache_log, asked, body.comparison_response_id)
        if self._keeps(body) or body.conversation is not None:
            await self._pack(needed_store(service), new)
        return GenerationRequest([prompt], self._params, 1, cache_salt, tools=tools, generates=not body.prewarms)

    async def complete(self, body: ResponsesRequest, generation: Generation) -> ResponseObject:
        [whole] = await generation.finished()
        writer = ResponseWriter(self._response(body, generation))
        writer.write(self._reader.read(whole), _logprobs(body, whole, generation))
        writer.response.confidence = self._confidence(whole)
        self._finish(writer, body, whole.finish_reason, generation)
        await self._keep(body, writer.response)
        return writer.response

    async def events(self, body: ResponsesRequest, generation: Generation) -> AsyncGenerator[bytes, None]:
        writer = ResponseWriter(self._response(body, generation))
        finish_reason = None
        try:
            only_text = not (self._reader.expects_calls or generation.may_think or body.prewarms)
            yield writer.begin(only_text=only_text)
            async with contextlib.aclosing(generation.deltas()) as deltas:
                async for delta in deltas:
                    finish_reason = delta.finish_reason
                    writer.response.confidence = self._confidence(delta)
                    if news := writer.write(self._reader.read(delta), _logprobs(body, delta, generation)):
                        yield news
            last = self._finish(writer, body, finish_reason, generation)
            # before the last event, so that a client that has read it can retrieve the response
            await self._keep(body, writer.response)
            yield last + writer.end()
        except VLMServeError as error:
            generation.failure = error
            last = writer.fail(str(error))
            with contextlib.suppress(VLMServeError):  # the history may be what failed
                await self._keep(body, writer.response)
            yield last

    def _finish(
        self, writer: ResponseWriter, body: ResponsesRequest, finish_reason: str | None, generation: Generation
    ) -> bytes:
        """The events after the last token, with cache diagnostics if requested."""
        assert self._diagnosis is not None
        writer.response.prompt_cache_diagnostics = diagnose(self._diagnosis, generation)
        if body.prewarms:
            return writer.finish_empty(generation.usage, generation.image_sizes)
        return writer.finish(finish_reason, generation.usage, generation.image_sizes)

    async def keep_failed(self, service: Service, body: ResponsesRequest, response: ResponseObject) -> None:
        """Store a response that another server began and cannot finish. Raises VLMServeError."""
        with service.bodies.share() as share:
            await self._pack(needed_store(service), await kept_items(service, self._owner, body.input, share))
            await self._keep(body, response)

    def reword(self, error: InvalidRequestError) -> None:
        error.args = (_flat(str(error)),)
        error.param = error.param and _flat(error.param)
        super().reword(error)

    def close(self) -> None:
        self._share.give_back()
        self._inputs = []

    def _keeps(self, body: ResponsesRequest) -> bool:
        return self._store is not None and body.store is not False

    async def _items_before(self, service: Service, body: ResponsesRequest, share: BodyShare) -> list[dict[str, Any]]:
        stored: list[StoredItem] = []
        if body.previous_response_id is not None:
            store = needed_store(service, "previous_response_id")
            try:
                stored = await store.run(store.responses.history, self._owner, body.previous_response_id)
            except NotFoundError as error:
                error.param, error.code = "previous_response_id", "previous_response_not_found"
                raise
        elif body.conversation is not None:
            store = needed_store(service, "conversation")
            stored = await store.run(store.conversations.all_items, self._owner, body.conversation.id)
        return await read_items(store, stored, service.max_body_bytes, share) if stored else []

    async def _prepare(
        self, service: Service, body: ResponsesRequest, turns: Turns, tools: ToolUse | None, share: BodyShare
    ) -> Prompt:
        settings = body.template_settings(service.preparer.template_settings)

        def prepare(messages: list[dict[str, Any]]) -> Awaitable[Prompt]:
            return service.preparation.prepare(
                messages,
                cache_salt=body.cache_salt or "",
                tools=tools,
                template_settings=settings,
                mm_processor_kwargs=body.processor_kwargs,
            )

        try:
            messages = await with_files(service, self._owner, turns.messages, share)
            if body.truncation == "disabled" or service.info is None:
                return await prepare(messages)
            context = service.info.max_prompt_len + 1
            # Clients often request more than the context, so keep half of it for the prompt.
            left = context - min(body.max_output_tokens or 1, context // 2)
            return await fitting(prepare, messages, left)
        except InvalidRequestError as error:
            turns.reword(error)
            raise

    async def _pack(self, store: Store, new: list[dict[str, Any]]) -> None:
        """Check the room for the items before the answer, which may take long."""
        self._inputs = await store.run(lambda: [PackedItem.of(item) for item in new])
        self._share.need(sum(len(item.body) + sum(map(len, item.blobs.values())) for item in self._inputs))
        self._file_ids = file_ids(new)
        await store.run(store.responses.check_room, self._inputs)

    async def _keep(self, body: ResponsesRequest, response: ResponseObject) -> None:
        conversation = None if body.conversation is None else body.conversation.id
        if self._store is None or not (response.store or (conversation and response.status != "failed")):
            return
        record = msgspec.to_builtins(response) if response.store else None
        outputs = [] if record is None else record.pop("output")
        await self._store.run(
            self._store.responses.save,
            self._owner,
            record,
            self._inputs,
            [PackedItem.of(item) for item in outputs or response.output],
            conversation,
            body.previous_response_id,
            self._file_ids,
        )

    def _confidence(self, delta: TextDelta) -> Any:
        return msgspec.UNSET if self._confidences is None else self._confidences.read(delta)

    def _response(self, body: ResponsesRequest, generation: Generation) -> ResponseObject:
        return ResponseObject(
            id=generation.id,
            created_at=generation.created,
            conversation=None if body.conversation is None else {"id": body.conversation.id},
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            metadata=body.metadata,
            model=generation.model,
            parallel_tool_calls=body.parallel_tool_calls,
            previous_response_id=body.previous_response_id,
            reasoning={"effort": body.reasoning.effort, "summary": body.reasoning.summary},
            store=self._keeps(body),
            text={"format": _shown_format(body), "verbosity": "medium"},
            temperature=self._params.temperature,
            tool_choice=body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.model_dump(),
            tools=[tool.model_dump() for tool in body.tools],
            top_logprobs=body.top_logprobs or 0,
            top_p=self._params.top_p,
            truncation=body.truncation,
        )


def _logprobs(body: ResponsesRequest, delta: TextDelta, generation: Generation) -> list[dict[str, Any]]:
    if body.wanted_logprobs is None:
        return []
    tokens = choice_logprobs((token.logprobs for token in delta.logprobs), TokenNames(generation.token_bytes))
    return [msgspec.to_builtins(token) for token in tokens.content]


def _flat(text: str) -> str:
    """Rewrite an error about tools to this API's flat form."""
    return _FUNCTION.sub(r"\1", text)


def _shown_format(body: ResponsesRequest) -> dict[str, Any]:
    if body.text.format is None:
        return {"type": "text"}
    return body.text.format.model_dump(by_alias=True, exclude_none=True)


async def create_response(request: Request) -> Response:
    """Answer a text or items, and store the response."""
    return await answer(request, ResponsesDialect(request.app.state.service, owner_of(request)))
