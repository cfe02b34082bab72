"""The engine process's heartbeat: every second, a thread reports the duration of the current step."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

INTERVAL = 1.0
"""Seconds between messages."""
_QUEUE = 4
"""Maximum unread messages."""


class Beat(msgspec.Struct, frozen=True):
    step_seconds: float
    """Seconds of the current step, 0 when idle."""
    rank_silence: float = 0.0
    """Seconds since another rank's last heartbeat."""


class StepClock:
    """Start time of the current step, written by the step loop and read by the heartbeat."""

    def __init__(self) -> None:
        self._began: float | None = None

    def begin(self) -> None:
        self._began = time.monotonic()

    def end(self) -> None:
        self._began = None

    @property
    def seconds(self) -> float:
        began = self._began
        return 0.0 if began is None else time.monotonic() - began


class Heartbeat:
    """Sends beats until closed. endpoint: of the engine's messages. rank_silence: see `Beat`."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        clock: StepClock,
        rank_silence: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._clock, self._rank_silence = clock, rank_silence
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(context, endpoint), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _beat(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        with context.socket(zmq.PUSH) as socket:
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.SNDHWM, _QUEUE)
            socket.connect(beat_endpoint(endpoint))
            while True:
                with contextlib.suppress(zmq.Again):  # no reader; the next heartbeat replaces this one
                    socket.send(msgspec.msgpack.encode(Beat(self._clock.seconds, self._rank_silence())), zmq.NOBLOCK)
                if self._over.wait(INTERVAL):
                    return


def beat_endpoint(endpoint: str) -> str:
    return f"{endpoint}-beat"
