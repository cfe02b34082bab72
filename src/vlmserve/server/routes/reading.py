from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncGenerator

from starlette.requests import Request

from vlmserve.server.body import BodyShare, read_json_body
from vlmserve.server.schema.base import Body, parse_body
from vlmserve.server.service import Service

_SMALL_BODY = 64 * 1024
"""Bytes that are parsed faster than a thread starts."""


@contextlib.asynccontextmanager
async def read(request: Request, kind: type[Body]) -> AsyncGenerator[Body, None]:
    """A body, in memory until the block ends. Loads the model if needed. Raises VLMServeError."""
    service: Service = request.app.state.service
    service.check_serving()
    with service.bodies.share() as share, service.demand.in_use():
        body = await read_parsed(request, kind, share)
        await service.wake()
        yield body


async def read_parsed(request: Request, kind: type[Body], share: BodyShare) -> Body:
    """Read and parse the body, in a worker thread if it is large. Raises VLMServeError."""
    service: Service = request.app.state.service
    data = await read_json_body(request, service.max_body_bytes, share, service.config.body_timeout)
    parse = functools.partial(parse_body, kind, data, service.body_limits)
    return parse() if len(data) <= _SMALL_BODY else await service.preparation.parse(parse)
