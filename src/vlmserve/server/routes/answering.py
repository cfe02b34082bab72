"""The path of a generating request, for all APIs: read, admit, prepare, generate, free."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from vlmserve.engine.admission import check_min_tokens
from vlmserve.errors import InvalidRequestError
from vlmserve.frontend.client import EngineClient
from vlmserve.prompt.expand import truncate
from vlmserve.server import progress
from vlmserve.server.body import BodyShare
from vlmserve.server.connection import RELAXED_HEADER, note, unless_disconnected
from vlmserve.server.errors import json_response
from vlmserve.server.generation import Generation, GenerationRequest, start_generation
from vlmserve.server.guard import account_of, salt_of
from vlmserve.server.hop import Hop, hop_of
from vlmserve.server.prompt_log import log_prompt
from vlmserve.server.routes.reading import read_parsed
from vlmserve.server.schema.asking import ModelRequest
from vlmserve.server.service import Service
from vlmserve.server.spans import record_generation, record_preparation, trace_of
from vlmserve.server.streams import EVENTS, EventStream, begin_in_time
from vlmserve.server.waiting import limit_preparation, limit_wait
from vlmserve.settings.config import ServerConfig

if TYPE_CHECKING:
    from vlmserve.server.tracing import Trace

Body = TypeVar("Body", bound=ModelRequest)

BACKGROUND = "vlmserve.background"
"""Key in an ASGI scope: True for a request that has low priority and may wait for any time."""
_PRIORITY = 1
"""Priority of background requests; others have 0."""
_STOP_STRINGS = ("stop", "stop_sequences")
"""Fields with stop strings, in all APIs."""


class Dialect(ABC, Generic[Body]):
    """Reads requests and writes responses of one API."""

    kind: type[Body]
    id_prefix: str
    operation: str = "chat"
    """OpenTelemetry's name of the operation."""
    content_field: str = "messages"
    """The body's field with the content of the prompt."""
    streams: bool = False
    """The request wants a stream; valid after its body was read."""
    media_type: str = EVENTS
    """Content type of streams."""

    async def read(self, request: Request, share: BodyShare) -> Body:
        return await read_parsed(request, self.kind, share)

    @abstractmethod
    def num_answers(self, body: Body) -> int:
        """Number of answers that a request wants."""

    def ready(self) -> object | None:
        """The response to a request that only asks to load the model; None for all others."""
        return None

    @abstractmethod
    async def ask(self, service: Service, body: Body) -> GenerationRequest:
        """Convert a request for generation. Raises VLMServeError."""

    @abstractmethod
    async def complete(self, body: Body, generation: Generation) -> object:
        """The response without ``stream``: builtins or msgspec structs. Raises VLMServeError."""

    def events(self, body: Body, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream. An error is the last event."""
        raise NotImplementedError

    def reword(self, error: InvalidRequestError) -> None:
        """Replace field names of chat completions by this API's."""
        if error.param in (None, "messages"):
            error.param = self.content_field

    def close(self) -> None:
        """Free the request's own resources. Called once, however the request ends."""


async def answer(request: Request, dialect: Dialect[Body]) -> Response:
    """Errors before the first byte are HTTP statuses; later ones are the stream's last event."""
    service: Service = request.app.state.service
    # a gateway sends the pings: before the first token, another worker may still answer
    interval = _ping_interval(service, dialect) if hop_of(request.scope) is None else 0
    return await begin_in_time(request, _answer(request, dialect), lambda: dialect.streams, interval)


def _ping_interval(service: Service, dialect: Dialect[Body]) -> float:
    """Seconds of silence before a ping; 0 for streams without comments."""
    return service.config.stream_ping_interval if dialect.media_type == EVENTS else 0


async def _answer(request: Request, dialect: Dialect[Body]) -> Response:
    service: Service = request.app.state.service
    service.check_serving()
    account = account_of(request)
    trace = trace_of(request)
    hop = hop_of(request.scope)
    background = bool(request.scope.get(BACKGROUND))
    max_wait = 0.0 if background else service.config.max_wait
    with contextlib.ExitStack() as stack:
        stack.callback(dialect.close)
        async with _share(service, background=background) as share:
            body = await dialect.read(request, share)
            dialect.streams = body.is_streamed
            if service.config.log_prompts:
                log_prompt(request, body)
            if (salt := salt_of(request, body.cache_salt)) != (body.cache_salt or ""):
                body = body.model_copy(update={"cache_salt": salt})
            if hop is not None:
                body = body.with_seed(hop.seed)
            _check_stop(body, service.config)
            service.names.check(body.model)
            arrived = time.monotonic()
            stack.enter_context(service.demand.in_use())
            if not service.awake:
                await unless_disconnected(request, service.wake())
            if (ready := dialect.ready()) is not None:
                return json_response(ready)
            client = service.client
            stack.enter_context(service.admit(dialect.num_answers(body)))
            async with limit_preparation(max_wait):
                generation_id = _generation_id(dialect, hop)
                priority = _PRIORITY if background else 0
                beginning = _start_generation(service, client, dialect, body, generation_id, arrived, trace, priority)
                generation = await unless_disconnected(request, beginning)
            body = body.without_content()  # frees the media, which are prepared; an answer may take long
        stack.callback(_report, request, dialect, generation, trace)
        stack.callback(generation.close)
        if hop is not None:
            hop.begun(generation)
        if account is not None:
            account.charge(generation.usage.prompt_tokens)
            stack.callback(lambda: account.charge(generation.usage.completion_tokens))
        stack.enter_context(limit_wait(client, generation, arrived, max_wait))
        if dialect.streams:
            events = dialect.events(body, generation)
            interval, comment = _ping_interval(service, dialect), None
            if interval and progress.HEADER in request.headers:
                interval, comment = min(interval, progress.INTERVAL), progress.progress_comments(client, generation)
            response: Response = EventStream(events, stack.pop_all(), interval, dialect.media_type, comment)
        else:
            response = json_response(await unless_disconnected(request, dialect.complete(body, generation)))
        if generation.relaxed:
            response.headers[RELAXED_HEADER] = ", ".join(generation.relaxed)
        return response


@contextlib.asynccontextmanager
async def _share(service: Service, *, background: bool) -> AsyncGenerator[BodyShare, None]:
    """Reserve memory for a body; background requests wait until few others have a share."""
    async with service.background_preparation if background else contextlib.nullcontext():
        with service.bodies.share() as share:
            yield share


def _generation_id(dialect: Dialect[Body], hop: Hop | None) -> str:
    tag = "" if hop is None else hop.tag
    return f"{dialect.id_prefix}{tag}{secrets.token_hex(16)[len(tag) :]}"


async def _start_generation(
    service: Service,
    client: EngineClient,
    dialect: Dialect[Body],
    body: Body,
    generation_id: str,
    arrived: float,
    trace: Trace | None,
    priority: int,
) -> Generation:
    started = time.monotonic()
    try:
        try:
            request = _bounded(await dialect.ask(service, body), service.config.max_output_tokens)
            most = client.info.max_prompt_len
            prompts = [truncate(prompt, request.params.truncate_prompt_tokens, most) for prompt in request.prompts]
            request = dataclasses.replace(request, prompts=prompts)
            for prompt in request.prompts:
                check_min_tokens(request.params.min_tokens, prompt, client.info)
        finally:
            if trace is not None:
                record_preparation(trace, time.monotonic() - started)
        service.metrics.media.observe(time.monotonic() - started)
        adapter = await service.names.adapter(client, body.model)
        return await start_generation(service, client, request, generation_id, arrived, adapter, priority)
    except InvalidRequestError as error:
        dialect.reword(error)
        raise


def _report(request: Request, dialect: Dialect[Body], generation: Generation, trace: Trace | None) -> None:
    text, fields = generation.summary()
    note(request, text, **fields)
    if trace is not None:
        record_generation(trace, dialect.operation, generation)


def _check_stop(body: ModelRequest, config: ServerConfig) -> None:
    for field in _STOP_STRINGS:
        strings = getattr(body, field, ())
        if len(strings) > config.max_stop_strings:
            raise InvalidRequestError(
                f"{field} has {len(strings)} strings; at most {config.max_stop_strings} are allowed", param=field
            )
        longest = max(map(len, strings), default=0)
        if longest > config.max_stop_length:
            raise InvalidRequestError(
                f"{field} has a string of {longest:,} characters; at most {config.max_stop_length:,} are allowed",
                param=field,
            )


def _bounded(request: GenerationRequest, most: int | None) -> GenerationRequest:
    """Limit answers to `most` tokens. Raises InvalidRequestError if `min_tokens` is larger."""
    if most is None:
        return request
    if request.params.min_tokens > most:
        raise InvalidRequestError(f"min_tokens: answers have at most {most} tokens here", param="min_tokens")
    limit = request.params.max_tokens
    params = msgspec.structs.replace(request.params, max_tokens=most if limit is None else min(limit, most))
    return dataclasses.replace(request, params=params)
