"""``POST /v1/responses``: an answer that follows earlier ones and is kept."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from vlmserve.errors import InvalidRequestError, NotFoundError, VLMServeError
from vlmserve.server.body import BodyShare
from vlmserve.server.generation import Generation, Question
from vlmserve.server.history import (
    chat_messages,
    file_ids,
    fitting,
    in_items_words,
    needed_store,
    owner_of,
    read_items,
    with_files,
)
from vlmserve.server.routes.answering import Dialect, answer
from vlmserve.server.routes.events import named_event
from vlmserve.server.schema.items import message, new_item_id, output_text
from vlmserve.server.schema.responses import ResponseObject, ResponsesRequest, ResponseUsage
from vlmserve.server.service import Service
from vlmserve.storage.items import PackedItem, StoredItem
from vlmserve.storage.store import Store
from vlmserve.types import Prompt, SamplingParams


class ResponsesDialect(Dialect[ResponsesRequest]):
    """OpenAI's responses; one of these serves one request. store: None if no history is kept."""

    kind = ResponsesRequest
    id_prefix = "resp_"
    content_field = "input"

    def __init__(self, service: Service, owner: str) -> None:
        self._store = service.store
        self._share: BodyShare = BodyShare(service.bodies)
        self._owner = owner
        self._params = SamplingParams()
        self._inputs: list[PackedItem] = []
        self._file_ids: list[str] = []

    def num_answers(self, body: ResponsesRequest) -> int:
        return 1

    async def ask(self, service: Service, body: ResponsesRequest) -> Question:
        if body.store and self._store is None:
            raise InvalidRequestError("This server keeps no history; leave store out", param="store")
        self._params = body.sampling_params(service.defaults, body.max_output_tokens, service.default_limit)
        new = [item.stored() for item in body.input]
        cache_salt = body.cache_salt or ""
        with service.bodies.share() as share:
            before = await self._items_before(service, body, share)
            prompt = await self._prepare(service, body, before, new, share)
        if self._keeps(body) or body.conversation is not None:
            await self._pack(needed_store(service), new)
        return Question([prompt], self._params, 1, cache_salt)

    async def complete(self, body: ResponsesRequest, generation: Generation) -> ResponseObject:
        [whole] = await generation.finished()
        response = self._response(body, generation)
        self._end(response, generation, whole.text, new_item_id(), whole.finish_reason)
        await self._keep(body, response)
        return response

    async def events(self, body: ResponsesRequest, generation: Generation) -> AsyncGenerator[bytes, None]:
        response = self._response(body, generation)
        send = _Events(new_item_id())
        text, finish_reason = "", None
        try:
            yield send.begin(response)
            async with contextlib.aclosing(generation.pieces()) as pieces:
                async for piece in pieces:
                    text, finish_reason = text + piece.text, piece.finish_reason
                    if piece.text:
                        yield send.delta(piece.text)
            self._end(response, generation, text, send.item_id, finish_reason)
            # Whoever hears that it is complete finds it again.
            await self._keep(body, response)
            yield send.end(response, text)
        except VLMServeError as error:
            generation.failure = error
            response.status, response.completed_at = "failed", None
            response.error = {"code": "server_error", "message": str(error)}
            yield send.event("response.failed", response=response)

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
        self,
        service: Service,
        body: ResponsesRequest,
        before: list[dict[str, Any]],
        new: list[dict[str, Any]],
        share: BodyShare,
    ) -> Prompt:
        messages = chat_messages(body.instructions, [*before, *new])
        try:
            messages = await with_files(service, self._owner, messages, share)
            if body.truncation == "disabled" or service.info is None:
                return await service.prepare(messages, body.cache_salt or "")
            return await fitting(
                lambda some: service.prepare(some, body.cache_salt or ""), messages, service.info.max_prompt_len
            )
        except InvalidRequestError as error:
            in_items_words(error, len(messages) - len(new))
            raise

    async def _pack(self, store: Store, new: list[dict[str, Any]]) -> None:
        """Hold what is to be kept until the answer is there, which may take long."""
        self._inputs = await store.run(lambda: [PackedItem.of(item) for item in new])
        self._share.need(sum(len(item.body) + sum(map(len, item.blobs.values())) for item in self._inputs))
        self._file_ids = file_ids(new)
        await store.run(store.responses.check_room, self._inputs)

    async def _keep(self, body: ResponsesRequest, response: ResponseObject) -> None:
        conversation = None if body.conversation is None else body.conversation.id
        if self._store is None or not (response.store or conversation):
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

    def _response(self, body: ResponsesRequest, generation: Generation) -> ResponseObject:
        return ResponseObject(
            id=generation.id,
            created_at=generation.created,
            conversation=None if body.conversation is None else {"id": body.conversation.id},
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata,
            model=generation.model,
            previous_response_id=body.previous_response_id,
            store=self._keeps(body),
            text={"format": _shown_format(body), "verbosity": "medium"},
            temperature=self._params.temperature,
            top_p=self._params.top_p,
            truncation=body.truncation,
        )

    def _end(
        self, response: ResponseObject, generation: Generation, text: str, item_id: str, finish_reason: str | None
    ) -> None:
        """Fill in what is known when the last token is there."""
        response.status = "incomplete" if finish_reason == "length" else "completed"
        if response.status == "completed":
            response.completed_at = int(time.time())
        else:
            response.incomplete_details = {"reason": "max_output_tokens"}
        response.output = [message("assistant", [output_text(text)], response.status, item_id)]
        response.usage = ResponseUsage.of(generation.usage)


def _shown_format(body: ResponsesRequest) -> dict[str, Any]:
    if body.text.format is None:
        return {"type": "text"}
    return body.text.format.model_dump(by_alias=True, exclude_none=True)


class _Events:
    """The events of one response, numbered."""

    def __init__(self, item_id: str) -> None:
        self.item_id = item_id
        self._count = 0
        self._place = {"item_id": item_id, "output_index": 0, "content_index": 0}

    def event(self, kind: str, **fields: Any) -> bytes:
        self._count += 1
        return named_event({"type": kind, "sequence_number": self._count - 1, **fields})

    def begin(self, response: ResponseObject) -> bytes:
        """All events before the first text."""
        item = message("assistant", [], "in_progress", self.item_id)
        return (
            self.event("response.created", response=response)
            + self.event("response.in_progress", response=response)
            + self.event("response.output_item.added", output_index=0, item=item)
            + self.event("response.content_part.added", **self._place, part=output_text(""))
        )

    def delta(self, text: str) -> bytes:
        return self.event("response.output_text.delta", **self._place, delta=text, logprobs=[])

    def end(self, response: ResponseObject, text: str) -> bytes:
        """All events after the last text."""
        return (
            self.event("response.output_text.done", **self._place, text=text, logprobs=[])
            + self.event("response.content_part.done", **self._place, part=output_text(text))
            + self.event("response.output_item.done", output_index=0, item=response.output[0])
            + self.event(f"response.{response.status}", response=response)
        )


async def create_response(request: Request) -> Response:
    """Answer a text or items, after what was said before."""
    return await answer(request, ResponsesDialect(request.app.state.service, owner_of(request)))
