"""Store responses as failed whose worker died while it answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from vlmserve.scaleout.messages import LOST_PATH, OWNER_HEADER, LostResponse
from vlmserve.scaleout.upstream import Upstream, UpstreamError
from vlmserve.server.body import read_body
from vlmserve.server.errors import json_response
from vlmserve.server.routes.responses import ResponsesDialect
from vlmserve.server.schema.base import parse_body
from vlmserve.server.schema.responses import ResponseObject, ResponsesRequest
from vlmserve.server.service import Service

logger = logging.getLogger(__name__)

_PATIENCE = 1.0
"""Seconds that a client's last event waits for the response to be stored."""
_TIMEOUT = 5.0
"""Timeout in seconds for a worker to store a response."""
_PAUSE = 0.5
_LONGEST = 60.0
"""Seconds between attempts, and for all attempts together."""
_MOST = 1000
"""Maximum responses that wait to be stored."""


class LostResponses:
    """workers: the answering ones. admit: keeps the gateway running until all are stored."""

    def __init__(
        self, workers: Callable[[], Sequence[tuple[str, Upstream]]], admit: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._workers = workers
        self._admit = admit
        self._tasks: set[asyncio.Task[None]] = set()

    async def keep(self, owner: str, body: bytes | bytearray, response: dict[str, Any]) -> None:
        """Have a worker store a failed response. After `_PATIENCE` seconds this continues in the background.

        body: the request's JSON.
        """
        if len(self._tasks) >= _MOST:
            logger.warning(
                "Response %s was cut off and is not stored: too many others wait to be stored", response.get("id")
            )
            return
        data = msgspec.json.encode(LostResponse(msgspec.Raw(bytes(body)), response))
        task = asyncio.ensure_future(self._keep(owner, data, response))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.wait((task,), timeout=_PATIENCE)

    async def _keep(self, owner: str, data: bytes, response: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _LONGEST
        with self._admit():
            while True:
                for _, upstream in self._workers():
                    if await _stored(upstream, owner, data):
                        return
                if loop.time() >= deadline:
                    logger.error("Response %s was cut off, and no worker stored it", response.get("id"))
                    return
                await asyncio.sleep(_PAUSE)


async def _stored(upstream: Upstream, owner: str, data: bytes) -> bool:
    try:
        headers = [(OWNER_HEADER, owner), ("content-type", "application/json")]
        async with asyncio.timeout(_TIMEOUT), upstream.request("POST", LOST_PATH, headers, data) as answer:
            if answer.status == HTTPStatus.OK:
                return True
            reason = await answer.read()
    except (UpstreamError, TimeoutError):
        return False
    if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR or answer.status == HTTPStatus.TOO_MANY_REQUESTS:
        return False
    logger.warning("No worker stores a response that was cut off: %s", reason.decode(errors="replace"))
    return True


async def store_lost(service: Service, request: Request, owner: str) -> Response:
    """Raises VLMServeError."""

    def read() -> tuple[ResponsesRequest, ResponseObject]:
        lost = msgspec.json.decode(data, type=LostResponse)
        body = parse_body(ResponsesRequest, bytes(lost.request), service.body_limits)
        return body, msgspec.convert(lost.response, ResponseObject)

    with service.bodies.share() as share:
        data = await read_body(request, 2 * service.max_body_bytes, share)
        body, response = await service.preparation.parse(read)
        dialect = ResponsesDialect(service, owner)
        try:
            await dialect.keep_failed(service, body, response)
        finally:
            dialect.close()
    return json_response({})
