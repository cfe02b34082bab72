"""The engine process: the parent's handle, and the child's main loop.

The child exits when its standard input closes, even if the parent crashes. Messages use a ZeroMQ PAIR socket in a
private folder.
"""

from __future__ import annotations

import logging
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import zmq

from vlmserve.engine import create_engine
from vlmserve.engine.child import exit_with_parent, socket_directory
from vlmserve.engine.compiling import CompilingRequests, Released
from vlmserve.engine.heartbeat import Heartbeat, StepClock
from vlmserve.engine.messages import (
    Abort,
    Accepted,
    AdapterDone,
    Add,
    Failed,
    Failure,
    Fatal,
    FromEngine,
    Inspect,
    Inspected,
    LoadAdapter,
    Loading,
    MapBlocks,
    Mapped,
    Outputs,
    Ready,
    Shutdown,
    UnloadAdapter,
    decode_to_engine,
    encode,
)
from vlmserve.engine.preload import Process, start_module
from vlmserve.engine.protocol import VLMEngine
from vlmserve.errors import ConfigurationError, EngineDeadError, ModelLoadError, VLMServeError
from vlmserve.garbage import freeze_loaded_objects
from vlmserve.logs import LogFormat, log_format_in_use, process_below, set_up_logging
from vlmserve.memory import num_killed
from vlmserve.models.progress import listener
from vlmserve.settings.config import EngineConfig
from vlmserve.types import EngineRequest

logger = logging.getLogger(__name__)

_MAX_MESSAGES_PER_STEP = 512
_LOAD_POLL_MS = 20
_COMPILE_POLL_MS = 2
_LINGER_MS = 30_000
"""Time to send the last message, because the parent may not listen yet."""
_STDERR = 2


class _Launch(msgspec.Struct, frozen=True):
    """One line of JSON."""

    endpoint: str
    config: str
    folder: str | None
    log_level: int
    log_format: LogFormat
    log_process: str


class EngineProcess:
    """The parent's handle on an engine process. Close it; the child also exits with its parent."""

    def __init__(self, process: Process, directory: Path) -> None:
        self._process = process
        self._directory = directory
        self.endpoint = _endpoint(directory)
        self._killed_before = num_killed()

    @classmethod
    def launch(cls, config: EngineConfig, folder: Path | None = None) -> EngineProcess:
        """Start the child. folder: the checkpoint, if `config.model` is already resolved."""
        directory = socket_directory()
        launch = _Launch(
            endpoint=_endpoint(directory),
            config=config.model_dump_json(),
            folder=None if folder is None else str(folder),
            log_level=logging.getLogger().getEffectiveLevel(),
            log_format=log_format_in_use(),
            log_process=process_below("engine"),
        )
        process = start_module("vlmserve.engine.process", _STDERR)  # the parent's output may be piped
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(launch) + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            logger.debug("The engine process exited before it read its settings")
        return cls(process, directory)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    @property
    def ran_out_of_memory(self) -> bool:
        """Return whether the kernel killed the child, or another process meanwhile, for lack of memory."""
        return self.returncode == -signal.SIGKILL and num_killed() > self._killed_before

    def wait(self, timeout: float | None = None) -> int:
        return self._process.wait(timeout)

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        if self.returncode is None:
            self.kill()
        self.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def serve_engine(engine: VLMEngine, socket: zmq.Socket[bytes], clock: StepClock | None = None) -> None:
    """Answer messages and run steps until `Shutdown`. Errors of `step` propagate.

    clock: records when steps begin and end.
    """
    clock = clock or StepClock()
    compiling = CompilingRequests(engine.grammars)
    wakes = zmq.Poller()
    for one in (socket, *engine.watched):
        wakes.register(one, zmq.POLLIN)
    while True:
        clock.end()
        # Blocks while idle. Threads that read adapters and compile grammars have no socket, so they are polled.
        idle = _COMPILE_POLL_MS if compiling else _LOAD_POLL_MS if engine.is_loading else None
        awake = wakes.poll(0 if engine.has_work() else idle)
        clock.begin()
        if any(one is not socket for one, _ in awake):
            engine.check()
        accepted = _add_released(engine, compiling.release(), socket)
        aborted = False
        for _ in range(_MAX_MESSAGES_PER_STEP):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            match decode_to_engine([frame.buffer for frame in frames]):
                case Add(requests):
                    accepted += _add(engine, compiling.hold(requests), socket)
                case Abort(request_ids):
                    compiling.abort(request_ids)
                    engine.abort(request_ids)
                    aborted = True
                case Inspect():
                    _send(socket, Inspected(engine.inspect()))
                case MapBlocks():
                    _send(socket, Mapped(engine.map_blocks()))
                case LoadAdapter(number, name, path, pool):
                    _answer(engine, socket, number, partial(engine.load_adapter, number, name, path, pool), begins=True)
                case UnloadAdapter(number, name):
                    _answer(engine, socket, number, partial(engine.unload_adapter, name))
                case Shutdown():
                    compiling.close()
                    return
        for number, error in engine.finished_loads():
            _send(socket, AdapterDone(number, None if error is None else Failure.of(error), engine.adapters))
        if accepted:
            _send(socket, Accepted(accepted))
        if engine.has_work():
            outputs = engine.step()
            _send(socket, Outputs(outputs, engine.stats()))
        elif aborted:
            _send(socket, Outputs([], engine.stats()))


def _answer(
    engine: VLMEngine, socket: zmq.Socket[bytes], number: int, change: Callable[[], None], *, begins: bool = False
) -> None:
    """begins: success is sent later."""
    try:
        change()
    except VLMServeError as error:
        _send(socket, AdapterDone(number, Failure.of(error), engine.adapters))
    else:
        if not begins:
            _send(socket, AdapterDone(number, None, engine.adapters))


def _add(engine: VLMEngine, requests: list[EngineRequest], socket: zmq.Socket[bytes]) -> list[str]:
    """Return accepted ids, and send rejections."""
    accepted = []
    for request in requests:
        try:
            engine.add(request)
        except VLMServeError as error:
            _send(socket, Failed(request.request_id, Failure.of(error)))
        else:
            accepted.append(request.request_id)
    return accepted


def _add_released(engine: VLMEngine, released: list[Released], socket: zmq.Socket[bytes]) -> list[str]:
    for request, error in released:
        if error is not None:
            _send(socket, Failed(request.request_id, Failure.of(error)))
    return _add(engine, [request for request, error in released if error is None], socket)


def main() -> int:
    for ignored in (signal.SIGINT, signal.SIGTERM):  # sent to whole process groups; the parent decides when to stop
        signal.signal(ignored, signal.SIG_IGN)
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Launch)
    set_up_logging(launch.log_format, launch.log_process, launch.log_level)
    directory = Path(launch.endpoint.removeprefix("ipc://")).parent
    threading.Thread(target=exit_with_parent, args=(directory,), daemon=True).start()
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set(zmq.LINGER, _LINGER_MS)
    socket.set(zmq.RECONNECT_IVL, 10)
    socket.connect(launch.endpoint)
    config = EngineConfig.model_validate_json(launch.config)

    def load() -> VLMEngine:
        engine = create_engine(config, None if launch.folder is None else Path(launch.folder))
        freeze_loaded_objects()
        return engine

    try:
        return load_and_serve(load, config.model, launch.endpoint, context, socket)
    finally:
        socket.close()
        context.term()


def load_and_serve(
    load: Callable[[], VLMEngine],
    model: str,
    endpoint: str,
    context: zmq.Context[zmq.Socket[bytes]],
    socket: zmq.Socket[bytes],
) -> int:
    """Load an engine and serve it over a socket connected to `endpoint`, with a heartbeat.

    model: its name in errors. Returns the exit code; the listener gets errors.
    """
    began = time.monotonic()
    listener.set(lambda text: _send(socket, Loading(text)))
    try:
        engine = load()
    except (ModelLoadError, ConfigurationError) as error:
        _send(socket, Fatal(Failure.of(error)))
        return 1
    except Exception as error:
        logger.exception("The model could not be loaded")
        _send(socket, Fatal(Failure.of(ModelLoadError(f"{model} could not be loaded: {_describe(error)}"))))
        return 1
    _send(socket, Ready(engine.info, engine.stats(), time.monotonic() - began, engine.adapters))
    clock = StepClock()
    heartbeat = Heartbeat(context, endpoint, clock, lambda: engine.silence)
    try:
        serve_engine(engine, socket, clock)
    except Exception as error:
        logger.exception("The engine failed")
        reason = str(error) if isinstance(error, EngineDeadError) else _describe(error)
        _send(socket, Fatal(Failure.of(EngineDeadError(f"The engine failed: {reason}"))))
        return 1
    finally:
        heartbeat.close()
    return 0


def _send(socket: zmq.Socket[bytes], message: FromEngine) -> None:
    socket.send_multipart(encode(message))


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _endpoint(directory: Path) -> str:
    return f"ipc://{directory}/engine"


if __name__ == "__main__":
    sys.exit(main())
