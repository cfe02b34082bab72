"""Limits of a request's time in the queue."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator
from http import HTTPStatus

from vlmserve.errors import VLMServeError
from vlmserve.frontend.client import EngineClient
from vlmserve.server.errors import RefusedError
from vlmserve.server.generation import Generation


@contextlib.asynccontextmanager
async def limit_preparation(limit: float) -> AsyncGenerator[None, None]:
    """Raise RefusedError (503) if the block takes `limit` seconds. 0: never."""
    try:
        async with asyncio.timeout(limit or None):
            yield
    except TimeoutError:
        raise _too_long(limit) from None


@contextlib.contextmanager
def limit_wait(client: EngineClient, generation: Generation, arrived: float, limit: float) -> Iterator[None]:
    """Fail a generation with RefusedError (503) unless the engine starts an answer in time.

    limit: seconds after `arrived`, by `time.monotonic`; 0: no limit.
    """
    if limit == 0:
        yield
        return
    check_task: asyncio.Future[None] | None = None

    def check() -> None:
        nonlocal check_task
        check_task = asyncio.ensure_future(_give_up(client, generation, limit))

    # a timer is cheaper than a task, and most requests finish before it fires
    timer = asyncio.get_running_loop().call_later(max(0.0, arrived + limit - time.monotonic()), check)
    try:
        yield
    finally:
        timer.cancel()
        if check_task is not None:
            check_task.cancel()


async def _give_up(client: EngineClient, generation: Generation, limit: float) -> None:
    if any(answer.num_tokens for answer in generation.answers):
        return
    # a dead engine has failed the generation already
    with contextlib.suppress(VLMServeError):
        await client.fail_waiting(generation.first_request_ids, lambda: _too_long(limit))


def _too_long(limit: float) -> RefusedError:
    message = f"The request waited for {limit:g} s and was not started; try again later"
    return RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, message, "queue_timeout")
