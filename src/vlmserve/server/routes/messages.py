"""``POST /v1/messages`` and ``/v1/messages/count_tokens``, for clients that speak Anthropic's dialect."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response

from vlmserve.errors import VLMServeError
from vlmserve.server.errors import json_response, messages_error_body
from vlmserve.server.generation import Generation, Piece, Question
from vlmserve.server.guard import salt_of
from vlmserve.server.routes.answering import Dialect, answer
from vlmserve.server.routes.events import named_event
from vlmserve.server.routes.reading import read
from vlmserve.server.schema.messages import CountRequest, MessageAnswer, MessagesRequest, MessageUsage, TextContent
from vlmserve.server.service import Service


class MessagesDialect(Dialect[MessagesRequest]):
    """Anthropic's messages."""

    kind = MessagesRequest
    id_prefix = "msg_"

    def num_answers(self, body: MessagesRequest) -> int:
        return 1

    async def ask(self, service: Service, body: MessagesRequest) -> Question:
        stop = [*body.stop, *body.stop_sequences]
        named = body.model_copy(update={"stop": stop})
        params = named.sampling_params(service.defaults, body.max_tokens, service.default_limit)
        cache_salt = body.cache_salt or ""
        return Question([await service.prepare(body.conversation(), cache_salt)], params, 1, cache_salt)

    async def complete(self, body: MessagesRequest, generation: Generation) -> MessageAnswer:
        [said] = await generation.finished()
        return MessageAnswer(
            generation.id,
            generation.model,
            [TextContent(said.text)] if said.text else [],
            _stop_reason(said),
            said.stop_string,
            _usage(generation),
        )

    async def events(self, body: MessagesRequest, generation: Generation) -> AsyncGenerator[bytes, None]:
        try:
            begun = MessageAnswer(generation.id, generation.model, [], None, None, _usage(generation))
            yield (
                named_event({"type": "message_start", "message": begun})
                + named_event({"type": "content_block_start", "index": 0, "content_block": TextContent("")})
                + named_event({"type": "ping"})
            )
            async with contextlib.aclosing(generation.pieces()) as pieces:
                async for piece in pieces:
                    if piece.text:
                        delta = {"type": "text_delta", "text": piece.text}
                        yield named_event({"type": "content_block_delta", "index": 0, "delta": delta})
            end = {"stop_reason": _stop_reason(piece), "stop_sequence": piece.stop_string}
            yield (
                named_event({"type": "content_block_stop", "index": 0})
                + named_event({"type": "message_delta", "delta": end, "usage": _usage(generation)})
                + named_event({"type": "message_stop"})
            )
        except VLMServeError as error:
            generation.failure = error
            yield named_event(messages_error_body(error))


def _stop_reason(said: Piece) -> str:
    if said.stop_string is not None:
        return "stop_sequence"
    return "max_tokens" if said.finish_reason == "length" else "end_turn"


def _usage(generation: Generation) -> MessageUsage:
    usage = generation.usage
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)


async def messages(request: Request) -> Response:
    """The route."""
    return await answer(request, MessagesDialect())


async def count_tokens(request: Request) -> Response:
    """How many tokens a conversation's prompt would have, pictures included."""
    service: Service = request.app.state.service
    async with read(request, CountRequest) as body:
        service.check_model(body.model)
        prompt = await service.prepare(body.conversation(), salt_of(request, None))
        return json_response({"input_tokens": len(prompt.token_ids)})
