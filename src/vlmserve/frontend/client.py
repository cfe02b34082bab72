"""The asynchronous client of an engine process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import zmq
import zmq.asyncio

from vlmserve.config import EngineConfig
from vlmserve.engine.messages import (
    Abort,
    Accepted,
    AdapterDone,
    Add,
    Failed,
    Failure,
    Fatal,
    Inspect,
    Inspected,
    LoadAdapter,
    MapBlocks,
    Mapped,
    Outputs,
    Ready,
    Shutdown,
    ToEngine,
    UnloadAdapter,
    decode_from_engine,
    encode,
)
from vlmserve.engine.process import EngineProcess
from vlmserve.errors import EngineDeadError, InvalidRequestError, ModelLoadError, UnavailableError, VLMServeError
from vlmserve.frontend.engine_stream import EngineStream
from vlmserve.frontend.heartbeat import HeartbeatListener
from vlmserve.types import AdapterInfo, BlockMap, EngineOutput, EngineRequest, EngineSnapshot, EngineStats, ModelInfo

logger = logging.getLogger(__name__)

_LOAD_TIMEOUT = 3600.0
_LOAD_NOTICE = 10.0
_EXIT_TIMEOUT = 5.0
LONGEST_TURN = 0.002
"""Seconds in which the engine's messages may be handled without a break for other tasks."""
_LAST_WORDS = 1.0
"""Seconds to wait for the message that says why the engine process exited."""
_OUT_OF_MEMORY = (
    "The kernel killed the engine process because memory ran out: free some, or set --quantize int4, a smaller "
    "--max-model-len or a smaller model (vlmserve doctor names those that fit)"
)


class KeptContext(zmq.asyncio.Context):
    """A context that only `term` terminates.

    ZeroMQ terminates a context once its sockets are closed. The garbage collector may find a client that was never
    closed, and finalize the context before the sockets: it would wait for them in whatever thread collects.
    """

    def __del__(self) -> None:
        pass


class EngineClient:
    """Owns an engine process and talks to it from one event loop. Make one with `start`, and close it."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process
        self._context = KeptContext()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set(zmq.LINGER, 0)
        self._streams: dict[str, EngineStream] = {}
        self._queries: dict[type[Inspect | MapBlocks], asyncio.Future[Any]] = {}
        """Queries about the engine's state that wait for a reply."""
        self._changes: dict[int, asyncio.Future[Failure | None]] = {}
        """Loads and unloads of adapters that have not ended, by number."""
        self._numbers = itertools.count()
        self.adapters: dict[str, AdapterInfo] = {}
        """Those that the engine serves, by name."""
        self._outbox: list[ToEngine] = []
        self._sends: set[asyncio.Future[Any]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[ModelInfo] = self._loop.create_future()
        self._last_words: asyncio.Future[VLMServeError] = self._loop.create_future()
        self._exited = asyncio.Event()
        self._died = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._death: str | None = None
        self._hang: str | None = None
        self._heartbeat = HeartbeatListener(self._context, process.endpoint)
        self._closing = False
        self.stats = EngineStats()
        """The engine's latest snapshot."""
        self.on_step: Callable[[EngineStats, EngineStats], None] | None = None
        """Called after every step with the stats before and after it."""
        self.load_seconds = 0.0
        """How long the engine took to load the model."""

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        folder: Path | None = None,
        *,
        process: EngineProcess | None = None,
        timeout: float = _LOAD_TIMEOUT,
    ) -> Self:
        """Start an engine process, or take one that was launched, and wait until its model is loaded.

        folder: the checkpoint, if `config.model` is resolved already. timeout: seconds to wait.
        Raises ModelLoadError or ConfigurationError as the engine did; EngineDeadError if it just exited.
        """
        client = cls(process or EngineProcess.launch(config, folder))
        try:
            await client._wait_until_ready(config.model, timeout)
        except BaseException:
            await client.close()
            raise
        return client

    @property
    def info(self) -> ModelInfo:
        """What is loaded."""
        return self._ready.result()

    @property
    def alive(self) -> bool:
        """Whether requests can be answered."""
        return self._death is None and not self._closing

    @property
    def death(self) -> str | None:
        """Why the engine process is gone."""
        return self._death

    @property
    def silence(self) -> float:
        """Seconds without a heartbeat of the engine's process; 0 until it is ready."""
        return self._heartbeat.silence

    @property
    def step_seconds(self) -> float:
        """How long the engine's current step had been running at the last heartbeat."""
        return self._heartbeat.step_seconds

    def kill(self, reason: str) -> None:
        """Kill an engine that hangs. reason: for the error that waiting requests get."""
        self._hang = reason
        self._process.kill()

    async def wait_until_dead(self) -> None:
        """Return once the engine process has exited unexpectedly and all waiting requests have failed."""
        await self._died.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def num_unfinished(self) -> int:
        """Requests that wait for an answer."""
        return len(self._streams)

    async def submit(self, request: EngineRequest) -> EngineStream:
        """Send a request and wait until the engine took it, which is at most one step.

        The stream must be closed. The id of an aborted request is not to be used again: outputs that are on their way
        would be taken for the new one's.
        Raises what `VLMEngine.add` does, EngineDeadError, UnavailableError while closing.
        """
        [stream] = await self.submit_together([request])
        return stream

    async def submit_together(self, requests: Sequence[EngineRequest]) -> list[EngineStream]:
        """`submit` requests in one message, which holds each image once. If the engine rejects one request, the others
        are aborted."""
        if not self.alive:
            raise self._gone()
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
            self._send(Add(list(requests)))
            for stream in streams.values():
                await stream.acceptance()
        except BaseException:
            for stream in streams.values():
                stream.close()
            raise
        return list(streams.values())

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """The outputs of a request; closing the generator aborts it. Raises as `submit`, also later on."""
        stream = await self.submit(request)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def inspect(self) -> EngineSnapshot:
        """The engine's state between two of its steps. Raises EngineDeadError, UnavailableError."""
        snapshot: EngineSnapshot = await self._query(Inspect())
        return snapshot

    async def map_blocks(self) -> BlockMap:
        """How the KV cache's blocks are used, between two steps. Raises as `inspect` does."""
        blocks: BlockMap = await self._query(MapBlocks())
        return blocks

    async def load_adapter(self, name: str, path: str, pool: Mapping[str, str] | None = None) -> AdapterInfo:
        """Have the engine load an adapter and serve it under a name, in place of what it served so.

        pool: see `VLMEngine.load_adapter`. Returns when it is served. Raises AdapterError for a bad one,
        EngineDeadError, UnavailableError.
        """
        await self._change(LoadAdapter(next(self._numbers), name, path, None if pool is None else dict(pool)))
        return self.adapters[name]

    async def unload_adapter(self, name: str) -> None:
        """Have the engine serve an adapter no more. Raises UnknownModelError for one that it does not serve, and what
        `load_adapter` raises."""
        await self._change(UnloadAdapter(next(self._numbers), name))

    async def _change(self, message: LoadAdapter | UnloadAdapter) -> None:
        if not self.alive:
            raise self._gone()
        done = self._changes[message.number] = self._loop.create_future()
        self._send(message)
        if (failure := await done) is not None:
            raise failure.error()

    async def _query(self, message: Inspect | MapBlocks) -> Any:
        if not self.alive:
            raise self._gone()
        if type(message) not in self._queries:
            self._queries[type(message)] = self._loop.create_future()
            self._send(message)
        # Callers in the meantime share one query, so that a busy engine does not get a queue of them.
        answer = await asyncio.shield(self._queries[type(message)])
        if answer is None:
            raise self._gone()
        return answer

    def fail_all(self, error: Callable[[], VLMServeError]) -> None:
        """Abort every request; its stream raises this error."""
        for stream in list(self._streams.values()):
            stream.fail(error)
            self._forget(stream.request_id)

    async def fail_waiting(self, request_ids: Collection[str], error: Callable[[], VLMServeError]) -> None:
        """Abort these requests if the engine has begun none of them; their streams raise this error.

        Raises as `inspect` does.
        """
        snapshot = await self.inspect()
        waiting = {shown.request_id for shown in snapshot.requests if shown.state == "waiting"}
        if waiting.issuperset(request_ids):
            for request_id in request_ids:
                if request_id in self._streams:
                    self._streams[request_id].fail(error)
                    self._forget(request_id)

    def _end_query(self, message: type[Inspect | MapBlocks], answer: EngineSnapshot | BlockMap | None) -> None:
        """Give callers the reply; None means that the engine is gone."""
        query = self._queries.pop(message, None)
        if query is not None:
            query.set_result(answer)

    def _end_queries(self) -> None:
        changes, self._changes = self._changes, {}
        for change in changes.values():
            if not change.done():
                change.set_exception(self._gone())
        for message in list(self._queries):
            self._end_query(message, None)

    async def close(self, grace: float = 0.0) -> None:
        """Take no more requests, give running ones `grace` seconds, then stop the process."""
        self._closing = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace)
        self.fail_all(lambda: UnavailableError("The engine was closed before the answer was complete"))
        self._end_queries()
        if self._ready.done() and not self._exited.is_set():
            self._send(Shutdown())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exited.wait(), _EXIT_TIMEOUT)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        self._heartbeat.close()
        self._context.term()
        if self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # retrieved, so that asyncio does not log it
        self._process.close()

    async def _wait_until_ready(self, model: str, timeout: float) -> None:
        self._socket.bind(self._process.endpoint)
        self._tasks = [self._task(work) for work in (self._receive(), self._watch(), self._listen())]
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

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        task.add_done_callback(self._check_task)
        return task

    def _check_task(self, task: asyncio.Task[None]) -> None:
        """Without this task no request would be answered, so the engine is stopped as well."""
        if not task.cancelled() and task.exception() is not None:
            logger.error("The engine's messages cannot be read", exc_info=task.exception())
            self._process.kill()

    def _wait_for_exit(self) -> None:
        self._process.wait()
        with contextlib.suppress(RuntimeError):  # the event loop is closed already
            self._loop.call_soon_threadsafe(self._exited.set)

    async def _watch(self) -> None:
        """Fail everything as soon as the process is gone."""
        await self._exited.wait()
        if self._closing:
            return
        code = self._process.returncode
        assert code is not None
        error: VLMServeError | None = None
        if code >= 0:
            with contextlib.suppress(TimeoutError):
                error = await asyncio.wait_for(asyncio.shield(self._last_words), _LAST_WORDS)
        if error is None and self._hang is not None:
            error = EngineDeadError(self._hang)
        if error is None and self._process.ran_out_of_memory:
            error = EngineDeadError(_OUT_OF_MEMORY)
        if error is None:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            error = EngineDeadError(f"The engine process {how}")
        self._death = str(error)
        if not self._ready.done():
            self._ready.set_exception(error)
        else:
            logger.error("%s; %d requests fail", error, len(self._streams))
        self.fail_all(self._gone)
        self._end_queries()
        self._died.set()

    async def _listen(self) -> None:
        await asyncio.wait([self._ready])
        await self._heartbeat.run()

    async def _receive(self) -> None:
        began = time.monotonic()
        while True:
            receiving = asyncio.ensure_future(self._socket.recv_multipart())
            if receiving.done() and time.monotonic() - began < LONGEST_TURN:
                frames = receiving.result()
            else:
                if receiving.done():  # awaiting it would yield to no other task
                    await asyncio.sleep(0)
                frames = await receiving
                began = time.monotonic()
            match decode_from_engine(frames[0]):
                case Outputs(outputs, stats):
                    if self.on_step is not None and stats.steps > self.stats.steps:
                        self.on_step(self.stats, stats)
                    self.stats = stats
                    for output in outputs:
                        self._dispatch(output)
                case Accepted(request_ids):
                    for request_id in request_ids:
                        if request_id in self._streams:
                            self._streams[request_id].accept()
                case Failed(request_id, failure):
                    self._end(request_id, failure.error)
                case Inspected(snapshot):
                    self._end_query(Inspect, snapshot)
                case Mapped(blocks):
                    self._end_query(MapBlocks, blocks)
                case AdapterDone(number, reason, adapters):
                    self.adapters = {adapter.name: adapter for adapter in adapters}
                    if not (change := self._changes.pop(number)).done():
                        change.set_result(reason)
                case Ready(info, stats, load_seconds, adapters):
                    self.stats, self.load_seconds = stats, load_seconds
                    self.adapters = {adapter.name: adapter for adapter in adapters}
                    self._ready.set_result(info)
                case Fatal(failure):
                    self._last_words.set_result(failure.error())

    def _dispatch(self, output: EngineOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:  # aborted while the output was on its way
            return
        if output.finish_reason is not None:
            self._drop(output.request_id)
        stream.put(output)

    def _end(self, request_id: str, error: Callable[[], VLMServeError]) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            self._drop(request_id)
            stream.fail(error)

    def _forget(self, request_id: str) -> None:
        """Abort a request that has not ended."""
        if request_id in self._streams:
            self._drop(request_id)
            if self._death is None and not self._exited.is_set():
                self._send(Abort([request_id]))

    def _drop(self, request_id: str) -> None:
        del self._streams[request_id]
        if not self._streams:
            self._idle.set()

    def _gone(self) -> VLMServeError:
        if self._death is not None:
            return EngineDeadError(self._death)
        return UnavailableError("The engine is being closed")

    def _send(self, message: ToEngine) -> None:
        """Hand a message over, in order; images are not copied. It leaves as soon as the engine takes it."""
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(message)

    def _flush(self) -> None:
        """Sends collected messages together: under load, the cost of a message is higher than that of its content."""
        messages, self._outbox = self._outbox, []
        if self._socket.closed:
            return
        for kind, alike in itertools.groupby(messages, type):
            for message in _merged(kind, list(alike)):
                self._transmit(message)

    def _transmit(self, message: ToEngine) -> None:
        """A request that cannot be encoded, because of what a caller in this process put into it, fails alone."""
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
                self._end(message.requests[0].request_id, lambda: InvalidRequestError(reason))
            return
        sending = asyncio.ensure_future(self._socket.send_multipart(frames, copy=False))
        self._sends.add(sending)
        sending.add_done_callback(self._sends.discard)


def _merged(kind: type, messages: list[Any]) -> list[ToEngine]:
    """The same in fewer messages. All are of that kind."""
    if kind is Add:
        return [Add([request for message in messages for request in message.requests])]
    if kind is Abort:
        return [Abort([request_id for message in messages for request_id in message.request_ids])]
    return messages
