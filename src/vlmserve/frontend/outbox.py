from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import zmq.asyncio

from vlmserve.engine.messages import Abort, Add, ToEngine, encode
from vlmserve.errors import InvalidRequestError, VLMServeError

Fail = Callable[[str, Callable[[], VLMServeError]], None]
"""Fails a request, by its id, with an error."""


class Outbox:
    """Sends messages in order, without waiting for the engine."""

    def __init__(self, loop: asyncio.AbstractEventLoop, socket: zmq.asyncio.Socket, fail: Fail) -> None:
        """fail: called for each request that cannot be encoded."""
        self._loop, self._socket, self._fail = loop, socket, fail
        self._messages: list[ToEngine] = []
        self._sending: set[asyncio.Future[Any]] = set()

    def send(self, message: ToEngine) -> None:
        """Send a message soon. Images are not copied."""
        if not self._messages:
            self._loop.call_soon(self._flush)
        self._messages.append(message)

    def _flush(self) -> None:
        """Send queued messages together: under load, a message costs more than its content."""
        messages, self._messages = self._messages, []
        if self._socket.closed:
            return
        for kind, alike in itertools.groupby(messages, type):
            for message in _merged(kind, list(alike)):
                self._transmit(message)

    def _transmit(self, message: ToEngine) -> None:
        """Send one message. A request that cannot be encoded fails alone."""
        try:
            frames = encode(message)
        except (TypeError, ValueError, OverflowError) as error:
            if not isinstance(message, Add):
                raise
            if len(message.requests) > 1:
                for request in message.requests:
                    self._transmit(Add([request]))
            else:
                reason = f"The request cannot be sent to the engine: {error}"
                self._fail(message.requests[0].request_id, lambda: InvalidRequestError(reason))
            return
        sending = asyncio.ensure_future(self._socket.send_multipart(frames, copy=False))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)


def _merged(kind: type, messages: list[Any]) -> list[ToEngine]:
    if kind is Add:
        return [Add([request for message in messages for request in message.requests])]
    if kind is Abort:
        return [Abort([request_id for message in messages for request_id in message.request_ids])]
    return messages
