"""What all routes that generate do: read, admit, prepare, generate, and let go of everything at the end."""

from __future__ import annotations

import contextlib
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from vlmserve.errors import InvalidRequestError
from vlmserve.frontend.client import EngineClient
from vlmserve.server.body import read_json_body
from vlmserve.server.connection import EventStream, note, unless_disconnected
from vlmserve.server.errors import json_response
from vlmserve.server.generation import Generation, Question, begin
from vlmserve.server.schema.base import parse_body
from vlmserve.server.schema.sampling import SamplingRequest
from vlmserve.server.service import Service

Body = TypeVar("Body", bound=SamplingRequest)


class Dialect(ABC, Generic[Body]):
    """How one API asks and answers."""

    kind: type[Body]
    id_prefix: str
    content_field: str = "messages"
    """Of the body, where the prompt comes from."""

    @abstractmethod
    def num_answers(self, body: Body) -> int:
        """How many answers a request wants in all."""

    @abstractmethod
    async def ask(self, service: Service, body: Body) -> Question:
        """What the engine is to do. Raises VLMServeError."""

    @abstractmethod
    async def complete(self, body: Body, generation: Generation) -> object:
        """The response without ``stream``, of builtins or msgspec structs. Raises VLMServeError."""

    @abstractmethod
    def events(self, body: Body, generation: Generation) -> AsyncGenerator[bytes, None]:
        """The events of the response with ``stream``, the last of which tells of an error if there is one."""


async def answer(request: Request, dialect: Dialect[Body]) -> Response:
    """Answer a request. Errors before the first byte are HTTP statuses; later ones are the stream's last event."""
    service: Service = request.app.state.service
    service.check_serving()
    with contextlib.ExitStack() as stack:
        with service.bodies.share() as share:
            body = parse_body(dialect.kind, await read_json_body(request, service.max_body_bytes, share))
            service.check_model(body.model)
            arrived = time.monotonic()
            if not service.awake:
                await unless_disconnected(request, service.wake())
            client = service.client
            stack.enter_context(service.admit(dialect.num_answers(body)))
            generation = await unless_disconnected(request, _begin(service, client, dialect, body, arrived))
            body = body.without_content()  # its pictures are prepared, and an answer may take long
        stack.callback(lambda: note(request, str(generation)))
        stack.callback(generation.close)
        if body.stream:
            return EventStream(dialect.events(body, generation), stack.pop_all())
        return json_response(await unless_disconnected(request, dialect.complete(body, generation)))


async def _begin(
    service: Service, client: EngineClient, dialect: Dialect[Body], body: Body, arrived: float
) -> Generation:
    started = time.monotonic()
    try:
        question = await dialect.ask(service, body)
        service.metrics.media.observe(time.monotonic() - started)
        return await begin(service, client, question, f"{dialect.id_prefix}{uuid.uuid4().hex}", arrived)
    except InvalidRequestError as error:
        if error.param in (None, "messages"):
            error.param = dialect.content_field
        raise
