"""How the engine's process shows that it is alive: a message every second, which says how long its step takes.

A thread of its own sends it, since a step may take long where the model is large. A process that is stopped or cannot
run sends none. The message also says for how long one of the other ranks has been silent.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

INTERVAL = 1.0
"""Seconds between two messages."""
_QUEUE = 4
"""Messages that may wait for a server that does not read them."""


class Beat(msgspec.Struct, frozen=True):
    step_seconds: float
    """How long the step loop has been at the same step; 0 while it has nothing to do."""
    rank_silence: float = 0.0
    """Seconds without a heartbeat of one of the other ranks."""


class StepClock:
    """When the step loop began what it does now; it writes and the heartbeat reads."""

    def __init__(self) -> None:
        self._began: float | None = None

    def begin(self) -> None:
        self._began = time.monotonic()

    def end(self) -> None:
        self._began = None

    @property
    def seconds(self) -> float:
        """Since it began; 0 if it has nothing to do."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began


class Heartbeat:
    """Sends beats until it is closed. endpoint: of the engine's messages. rank_silence: see `Beat`."""

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
    """Where beats go, beside the engine's messages."""
    return f"{endpoint}-beat"
