"""The body of a request that is answered at once."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from starlette.requests import Request

from vlmserve.server.body import read_json_body
from vlmserve.server.schema.base import Body, parse_body
from vlmserve.server.service import Service


@contextlib.asynccontextmanager
async def read(request: Request, kind: type[Body]) -> AsyncGenerator[Body, None]:
    """The body, counted among those in memory until the block ends, while the model is there. Raises VLMServeError."""
    service: Service = request.app.state.service
    service.check_serving()
    with service.bodies.share() as share:
        data = await read_json_body(request, service.max_body_bytes, share, service.config.body_timeout)
        body = parse_body(kind, data)
        await service.wake()
        yield body
