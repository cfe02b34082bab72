from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

import msgspec

from vlmserve.errors import VLMServeError
from vlmserve.types import EngineOutput


class EngineStream:
    """Outputs in order. Outputs between two reads are merged.

    Iterating raises EngineDeadError or UnavailableError. Close it to abort the request.
    """

    def __init__(self, request_id: str, forget: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._forget = forget
        self._news = asyncio.Event()
        self._accepted = False
        self._pending: EngineOutput | None = None
        self._error: Callable[[], VLMServeError] | None = None
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> EngineOutput:
        if self._ended:
            raise StopAsyncIteration
        while (output := self._pending) is None:
            await self._wait()
        self._pending = None
        self._ended = output.finish_reason is not None
        return output

    def close(self) -> None:
        self._ended = True
        self._forget(self.request_id)

    async def acceptance(self) -> None:
        while not (self._accepted or self._pending):
            await self._wait()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error()
        self._news.clear()
        await self._news.wait()

    def accept(self) -> None:
        self._accepted = True
        self._news.set()

    def put(self, output: EngineOutput) -> None:
        if self._pending is not None:
            token_ids, logprobs = self._pending.token_ids, self._pending.logprobs
            # `+` would copy all unread tokens for every new token.
            token_ids += output.token_ids
            if logprobs is not None:
                logprobs += output.logprobs or ()
            output = msgspec.structs.replace(
                output,
                token_ids=token_ids,
                timings=output.timings or self._pending.timings,
                logprobs=logprobs,
                prompt_logprobs=self._pending.prompt_logprobs or output.prompt_logprobs,
                missed=self._pending.missed or output.missed,
            )
        self._pending = output
        self._news.set()

    def fail(self, error: Callable[[], VLMServeError]) -> None:
        """error: makes a new exception for every place that raises it."""
        self._error = error
        self._news.set()
