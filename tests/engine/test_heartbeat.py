"""The engine's heartbeat."""

from __future__ import annotations

import time

import msgspec
import pytest
import zmq

from tests.waiting import wait_until
from vlmserve.engine import heartbeat
from vlmserve.engine.heartbeat import Beat, Heartbeat, StepClock, beat_endpoint


def test_heartbeats_say_how_long_steps_take(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL", 0.01)
    endpoint, clock = f"ipc://{tmp_path}/engine", StepClock()
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.bind(beat_endpoint(endpoint))
        beating = Heartbeat(context, endpoint, clock)

        def beat() -> float:
            assert socket.poll(20_000)
            return msgspec.msgpack.decode(socket.recv(), type=Beat).step_seconds

        assert beat() == 0
        clock.begin()
        deadline = time.monotonic() + 20
        while beat() < 0.05:
            assert time.monotonic() < deadline
        clock.end()
        while beat() > 0:
            assert time.monotonic() < deadline
        beating.close()
        while socket.poll(50):
            socket.recv()
        assert not socket.poll(50)


def test_nobody_has_to_read_beats(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL", 0.0005)
    beats = 0

    def rank_silence() -> float:
        nonlocal beats
        beats += 1
        return 0.0

    with zmq.Context() as context:
        beating = Heartbeat(context, f"ipc://{tmp_path}/engine", StepClock(), rank_silence)
        wait_until(lambda: beats > 100)
        beating.close()
