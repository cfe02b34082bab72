"""Listens to the engine's heartbeat."""

from __future__ import annotations

import asyncio

import msgspec
import zmq
import zmq.asyncio

from vlmserve.engine.heartbeat import INTERVAL, Beat, beat_endpoint

_PATIENCE = 2 * INTERVAL


class HeartbeatListener:
    """silence: seconds since the last beat of the engine or a rank. step_seconds: age of the running step then."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        self.silence = self.step_seconds = 0.0
        self._socket = context.socket(zmq.PULL)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(beat_endpoint(endpoint))

    async def run(self) -> None:
        """Listen until cancelled. While the engine loads, it has no heartbeat."""
        while True:
            try:
                async with asyncio.timeout(_PATIENCE):
                    frame = await self._socket.recv()
            except TimeoutError:
                # While this process is suspended, no heartbeat arrives, so do not read the clock.
                self.silence += _PATIENCE
            else:
                beat = msgspec.msgpack.decode(frame, type=Beat)
                self.silence, self.step_seconds = beat.rank_silence, beat.step_seconds

    def close(self) -> None:
        self._socket.close()
