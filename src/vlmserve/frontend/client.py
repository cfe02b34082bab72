"""The asynchronous client of an engine process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Self

import msgspec
import zmq
import zmq.asyncio

from vlmserve.engine.heartbeat import INTERVAL, Beat, beat_endpoint
from vlmserve.engine.messages import (
    Abort,
    Accepted,
    AdapterDone,
    Add,
    Failed,
    Fatal,
    FromEngine,
    Inspected,
    Loading,
    Mapped,
    Outputs,
    Ready,
    Shutdown,
    decode_from_engine,
)
from vlmserve.engine.process import EngineProcess
from vlmserve.errors import EngineDeadError, InvalidRequestError, ModelLoadError, UnavailableError, VLMServeError
from vlmserve.frontend.engine_calls import EngineCalls
from vlmserve.frontend.engine_stream import EngineStream
from vlmserve.frontend.outbox import Outbox
from vlmserve.settings.config import EngineConfig
from vlmserve.types import EngineRequest, EngineStats, ModelInfo

logger = logging.getLogger(__name__)

_LOAD_TIMEOUT = 3600.0
_LOAD_NOTICE = 10.0
_EXIT_TIMEOUT = 5.0
LONGEST_TURN = 0.002
"""Seconds that the engine's messages may be handled without a break for other tasks."""
_LAST_WORDS = 1.0
"""Seconds to wait for the message that says why the engine process exited."""
_OUT_OF_MEMORY = (
    "The kernel killed the engine process because memory ran out: free some, or set --quantize int4, a smaller "
    "--max-model-len or a smaller model (vlmserve doctor names those that fit)"
)
_PATIENCE = 2 * INTERVAL


class KeptContext(zmq.asyncio.Context):
    """A context that only `term` terminates.

    Other contexts terminate when the garbage collector finalizes them, and wait for their sockets in any thread.
    """

    def __del__(self) -> None:
        pass


class EngineClient:
    """Talks to an engine process from one event loop. Make one with `start`, and close it."""

    def __init__(self, process: EngineProcess) -> None:
        self.process = process
        self._context = KeptContext()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set(zmq.LINGER, 0)
        self._streams: dict[str, EngineStream] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._loop = asyncio.get_running_loop()
        self.outbox = Outbox(self._loop, self._socket, self._end)
        self.calls = EngineCalls(self.outbox.send, self._gone)
        self._ready: asyncio.Future[ModelInfo] = self._loop.create_future()
        self._last_words: asyncio.Future[VLMServeError] = self._loop.create_future()
        self._exited = asyncio.Event()
        self.died = asyncio.Event()
        """Set once the engine process has exited unexpectedly and all waiting requests have failed."""
        self._idle = asyncio.Event()
        self._idle.set()
        self.death: str | None = None
        """Why the engine process exited."""
        self._hang: str | None = None
        self.heartbeat = HeartbeatListener(self._context, process.endpoint)
        self._closing = False
        self.stats = EngineStats()
        self.on_step: Callable[[EngineStats, EngineStats], None] | None = None
        """Called after every step with the stats before and after it."""
        self._on_progress: Callable[[str], None] | None = None
        self.load_seconds = 0.0
        """Seconds that the engine took to load the model."""

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        folder: Path | None = None,
        *,
        process: EngineProcess | None = None,
        timeout: float = _LOAD_TIMEOUT,
        on_progress: Callable[[str], None] | None = None,
    ) -> Self:
        """Start an engine process, or adopt a launched one, and wait until its model is loaded.

        folder: the checkpoint, if `config.model` is already resolved. timeout: seconds. on_progress: gets lines about
        loading. Raises the engine's ModelLoadError or ConfigurationError, and EngineDeadError if it exited without a
        reason.
        """
        client = cls(process or EngineProcess.launch(config, folder))
        client._on_progress = on_progress
        try:
            await client._wait_until_ready(config.model, timeout)
        except BaseException:
            await client.close()
            raise
        return client

    @property
    def info(self) -> ModelInfo:
        return self._ready.result()

    @property
    def alive(self) -> bool:
        return self._gone() is None

    def kill(self, reason: str) -> None:
        """Kill a hanging engine. reason: for the error of waiting requests."""
        self._hang = reason
        self.process.kill()

    @property
    def num_unfinished(self) -> int:
        return len(self._streams)

    async def submit_together(self, requests: Sequence[EngineRequest]) -> list[EngineStream]:
        """Send requests in one message with each image once, and wait until the engine has added them.

        If one is rejected, the others are aborted. Close the streams. Never reuse the id of an aborted request, whose
        outputs may be in flight. Raises what `VLMEngine.add` does, EngineDeadError, and UnavailableError while closing.
        """
        if (error := self._gone()) is not None:
            raise error
        streams: dict[str, EngineStream] = {}
        for request_id in (request.request_id for request in requests):
            if request_id in self._streams or request_id in streams:
                raise InvalidRequestError(f"request id {request_id!r} is in use", param="request_id")
            streams[request_id] = EngineStream(request_id, self._forget)
        if not streams:
            return []
        self._streams |= streams
        self._idle.clear()
        try:
            self.outbox.send(Add(list(requests)))
            for stream in streams.values():
                await stream.acceptance()
        except BaseException:
            for stream in streams.values():
                stream.close()
            raise
        return list(streams.values())

    def fail_all(self, error: Callable[[], VLMServeError]) -> None:
        for stream in list(self._streams.values()):
            stream.fail(error)
            self._forget(stream.request_id)

    async def fail_waiting(self, request_ids: Collection[str], error: Callable[[], VLMServeError]) -> None:
        """Abort these requests if the engine has started none of them. Raises as `EngineCalls.inspect` does."""
        snapshot = await self.calls.inspect()
        waiting = {shown.request_id for shown in snapshot.requests if shown.state == "waiting"}
        if waiting.issuperset(request_ids):
            for request_id in request_ids:
                if request_id in self._streams:
                    self._streams[request_id].fail(error)
                    self._forget(request_id)

    async def close(self, grace: float = 0.0) -> None:
        """Reject new requests, give running ones `grace` seconds, then stop the process."""
        self._closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self._idle.wait()
        self.fail_all(lambda: UnavailableError("The engine was closed before the answer was complete"))
        self.calls.end()
        if self._ready.done() and not self._exited.is_set():
            self.outbox.send(Shutdown())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EXIT_TIMEOUT):
                    await self._exited.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        self.heartbeat.close()
        self._context.term()
        if self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # so that asyncio does not log it
        self.process.close()

    async def _wait_until_ready(self, model: str, timeout: float) -> None:
        self._socket.bind(self.process.endpoint)
        for work in (self._receive(), self._watch(), self._listen()):
            self._tasks.append(task := self._loop.create_task(work))
            task.add_done_callback(partial(_check_task, self.process))
        threading.Thread(target=self._wait_for_exit, daemon=True).start()
        started = time.monotonic()
        while not self._ready.done():
            waited = time.monotonic() - started
            if waited >= timeout:
                raise ModelLoadError(f"{model} was not loaded within {timeout:.0f} s")
            if waited >= _LOAD_NOTICE:
                logger.info("Still loading %s (%.0f s)", model, waited)
            await asyncio.wait([self._ready], timeout=min(_LOAD_NOTICE, timeout - waited))
        self._ready.result()

    def _wait_for_exit(self) -> None:
        self.process.wait()
        with contextlib.suppress(RuntimeError):  # the event loop is already closed
            self._loop.call_soon_threadsafe(self._exited.set)

    async def _watch(self) -> None:
        await self._exited.wait()
        if self._closing:
            return
        code = self.process.returncode
        assert code is not None
        error: VLMServeError | None = None
        if code >= 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS):
                    error = await asyncio.shield(self._last_words)
        if error is None and self._hang is not None:
            error = EngineDeadError(self._hang)
        if error is None and self.process.ran_out_of_memory:
            error = EngineDeadError(_OUT_OF_MEMORY)
        if error is None:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            error = EngineDeadError(f"The engine process {how}")
        self.death = str(error)
        if not self._ready.done():
            self._ready.set_exception(error)
        else:
            logger.error("%s; %d requests fail", error, len(self._streams))
        self.fail_all(lambda: EngineDeadError(str(error)))
        self.calls.end()
        self.died.set()

    async def _listen(self) -> None:
        await asyncio.wait([self._ready])
        await self.heartbeat.run()

    async def _receive(self) -> None:
        began = time.monotonic()
        while True:
            receiving = asyncio.ensure_future(self._socket.recv_multipart())
            if receiving.done() and time.monotonic() - began < LONGEST_TURN:
                frames = receiving.result()
            else:
                if receiving.done():  # awaiting it would not yield to other tasks
                    await asyncio.sleep(0)
                frames = await receiving
                began = time.monotonic()
            self._handle(decode_from_engine(frames[0]))

    def _handle(self, message: FromEngine) -> None:
        match message:
            case Outputs(outputs, stats):
                if self.on_step is not None and stats.steps > self.stats.steps:
                    self.on_step(self.stats, stats)
                self.stats = stats
                for output in outputs:
                    if (stream := self._streams.get(output.request_id)) is not None:  # else it was aborted meanwhile
                        if output.finish_reason is not None:
                            self._drop(output.request_id)
                        stream.put(output)
            case Accepted(request_ids):
                for request_id in request_ids:
                    if request_id in self._streams:
                        self._streams[request_id].accept()
            case Failed(request_id, failure):
                self._end(request_id, failure.error)
            case Inspected() | Mapped() | AdapterDone():
                self.calls.reply(message)
            case Loading(text):
                if self._on_progress is not None:
                    self._on_progress(text)
            case Ready(info, stats, load_seconds, adapters):
                self.stats, self.load_seconds = stats, load_seconds
                self.calls.serve(adapters)
                self._ready.set_result(info)
            case Fatal(failure):
                self._last_words.set_result(failure.error())

    def _end(self, request_id: str, error: Callable[[], VLMServeError]) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            self._drop(request_id)
            stream.fail(error)

    def _forget(self, request_id: str) -> None:
        if request_id in self._streams:
            self._drop(request_id)
            if self.death is None and not self._exited.is_set():
                self.outbox.send(Abort([request_id]))

    def _drop(self, request_id: str) -> None:
        del self._streams[request_id]
        if not self._streams:
            self._idle.set()

    def _gone(self) -> VLMServeError | None:
        if self.death is not None:
            return EngineDeadError(self.death)
        return UnavailableError("The engine is being closed") if self._closing else None


def _check_task(process: EngineProcess, task: asyncio.Task[None]) -> None:
    """Kill the engine if the task failed: without it, requests would wait forever."""
    if not task.cancelled() and task.exception() is not None:
        logger.error("The engine's messages cannot be read", exc_info=task.exception())
        process.kill()


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
