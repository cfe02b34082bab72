"""Starts and stops the engine process and the web server. Few imports precede the engine's, so that both load in
parallel.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmserve.engine import check_settings
from vlmserve.engine.process import EngineProcess
from vlmserve.errors import ConfigurationError
from vlmserve.frontend.defaults import default_sampling
from vlmserve.garbage import freeze_loaded_objects
from vlmserve.logs import level_number, log_format_in_use, set_up_logging
from vlmserve.models.hub import resolve_model
from vlmserve.server.activity import activity_log
from vlmserve.settings.config import EngineConfig, MediaConfig, ServerConfig
from vlmserve.types import ModelInfo

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from vlmserve.frontend.client import EngineClient
    from vlmserve.frontend.requests import RequestPreparer
    from vlmserve.server.front import Front
    from vlmserve.server.service import Service
    from vlmserve.server.web import WebServer

logger = logging.getLogger(__name__)

_MAX_FILES = 65536
LOOPBACK = ("127.0.0.1", "::1", "localhost")

SIGNAL_ECHO = 0.3
"""Seconds in which a repeated signal is ignored: make forwards signals that its process group already got."""


@dataclass(frozen=True)
class Membership:
    wrap: Callable[[ASGIApp, Service], ASGIApp]
    """Adds middleware to the application."""
    announce: Callable[[str, Service], None]
    """Gets the URL when the model has loaded, in place of standard output."""
    on_progress: Callable[[str], None]
    """Gets lines about the progress of loading."""


def serve(engine: EngineConfig, media: MediaConfig, server: ServerConfig, membership: Membership | None = None) -> None:
    """Serve until SIGINT or SIGTERM, then let running requests finish; a second signal ends everything at once.

    The port opens before the model has loaded. Raises ConfigurationError if the address is taken, ModelLoadError if the
    model cannot be loaded.
    """
    set_up_logging(server.log_format, level=level_number(server.log_level))
    quiet_logs(server)
    if membership is not None and server.sleep_after:
        raise ConfigurationError("--sleep-after is for single servers; workers of a cluster keep their model loaded")
    raise_file_limit()
    listener = bind(server)
    folder = resolve_model(engine.model, engine.revision, engine.mmproj)
    with contextlib.closing(_Launcher(engine, folder)) as launcher:
        if engine.load == "eager":
            launcher.launch()
            check_settings(engine, folder)
        from vlmserve.server.app import create_app
        from vlmserve.server.service import Service
        from vlmserve.server.web import WebServer

        service = Service(engine, media, server)
        app: ASGIApp = create_app(service)
        if membership is not None:
            app = membership.wrap(app, service)
        else:
            warn_of_strangers(service)
        web = WebServer(app, server, listener)
        announce = _announce_server if membership is None else membership.announce
        if membership is not None:
            service.on_load_progress = membership.on_progress
        with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
            runner.run(_serve(service, web, launcher, media, lambda url: announce(url, service)))


def quiet_logs(server: ServerConfig) -> None:
    """Log only warnings of libraries, and of requests without `--access-log`."""
    for name in ("uvicorn.error", "httpx", *(() if server.access_log else ("vlmserve.access",))):
        logging.getLogger(name).setLevel(logging.WARNING)


def warn_of_strangers(front: Front) -> None:
    if front.keys is None and front.config.host not in LOOPBACK:
        logger.warning("Everybody who reaches %s may use this server; --api-key requires a key", front.config.host)


def _announce_server(url: str, service: Service) -> None:
    if service.phase == "asleep":
        _announce(f"vlmserve listens on {url}; the first request loads {service.model_name}", url, service.model_name)
    elif service.info is not None:
        _announce(ready_line(url, service.model_name, service.info), url, service.model_name)


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the faster event loop's factory; None if only asyncio's own is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


class _Launcher:
    def __init__(self, engine: EngineConfig, folder: Path) -> None:
        self.engine = engine
        self.folder = folder
        self._process: EngineProcess | None = None
        self._taken = False

    def launch(self) -> None:
        """Start a process for a later `take`."""
        self.close()
        self._process = EngineProcess.launch(self.engine, self.folder)
        self._taken = False

    def take(self) -> EngineProcess:
        if self._process is None or self._taken:
            self.launch()
        assert self._process is not None
        self._taken = True
        return self._process

    def close(self) -> None:
        if self._process is not None:
            self._process.close()


def bind(server: ServerConfig) -> socket.socket:
    """A socket that refuses connections until the web server listens on it.

    Raises ConfigurationError if the address is in use or not this machine's.
    """
    family, kind, address = address_of(server)
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _no_address(server, error) from None
    return listener


def address_of(server: ServerConfig) -> tuple[socket.AddressFamily, socket.SocketKind, tuple[Any, ...]]:
    """Return family, type and address of the socket. Raises ConfigurationError."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise _no_address(server, error) from None
    return family, kind, address


def _no_address(server: ServerConfig, error: OSError) -> ConfigurationError:
    reason = error.strerror or str(error)
    return ConfigurationError(
        f"cannot listen on {server.host} port {server.port}: {reason}; choose another --host or --port"
    )


async def _serve(
    service: Service, web: WebServer, launcher: _Launcher, media: MediaConfig, announce: Callable[[str], None]
) -> None:
    from vlmserve.server.batches.runner import batches_running

    stop = stop_on_signals(launcher.close)
    web.start()
    batches = contextlib.AsyncExitStack()
    try:
        await batches.enter_async_context(batches_running(service))
        if service.phase == "asleep":
            announce(web.url)
        loading = asyncio.ensure_future(_load(service, launcher, media))
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            await service.drain(0)
            return
        client, preparer, load_time = loading.result()
        service.open(client, preparer, default_sampling(launcher.folder))
        freeze_loaded_objects()
        announce(web.url)
        preparer.answers.trials.start()
        async with activity_log(service.engine_stats, service.config.stats_interval):
            await _supervise(service, client, launcher, load_time, stopping, batches)
    finally:
        await batches.aclose()
        await service.drain(0)  # a dead engine's worker leaves its gateways at once
        await web.stop()
        service.close()


async def _supervise(
    service: Service,
    client: EngineClient,
    launcher: _Launcher,
    load_time: float,
    stopping: asyncio.Future[Any],
    batches: contextlib.AsyncExitStack,
) -> None:
    """Serve until the server has stopped and drained. batches: closed before draining.

    Raises EngineDeadError.
    """
    from vlmserve.frontend.client import EngineClient
    from vlmserve.server.supervision import Supervisor

    def start() -> Coroutine[Any, Any, EngineClient]:
        return EngineClient.start(launcher.engine, process=launcher.take())

    supervisor = Supervisor(service, client, start, load_time)
    watching = asyncio.ensure_future(supervisor.run())
    try:
        await asyncio.wait((watching, stopping), return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()
        await batches.aclose()
        await _drain(service)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await supervisor.close()


async def _load(
    service: Service, launcher: _Launcher, media: MediaConfig
) -> tuple[EngineClient, RequestPreparer, float]:
    """Make client and preparer in parallel, when wanted. Also returns the seconds."""
    await service.demand.wanted.wait()
    began = time.monotonic()
    from vlmserve.frontend.client import EngineClient

    engine = launcher.engine

    def tell(progress: str) -> None:
        service.load_progress = progress
        service.on_load_progress(progress)

    def make_preparer() -> RequestPreparer:
        from vlmserve.frontend.requests import RequestPreparer

        return RequestPreparer(launcher.folder, media, engine.model_impl, engine.chat_template, engine=engine)

    starting = asyncio.ensure_future(EngineClient.start(engine, process=launcher.take(), on_progress=tell))
    try:
        preparer = await asyncio.to_thread(make_preparer)
        client = await starting
    except BaseException:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        raise
    try:
        preparer.fit(client.info)
    except BaseException:
        await client.close()
        raise
    return client, preparer, time.monotonic() - began


async def _drain(service: Service) -> None:
    grace = service.config.shutdown_grace
    if service.num_answers:
        logger.info("Finishing %d answers, for at most %g s; Ctrl-C again ends them", service.num_answers, grace)
    if not await service.drain(grace):
        logger.warning("%d answers are not finished and fail now", service.num_answers)


def stop_on_signals(kill: Callable[[], None]) -> asyncio.Event:
    """An event that the first signal sets. The second kills the engine and ends the process."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    first = 0.0

    def handle(number: signal.Signals) -> None:
        nonlocal first
        if not stop.is_set():
            first = loop.time()
            logger.info("Stopping: got %s", number.name)
            stop.set()
        elif loop.time() - first > SIGNAL_ECHO:
            kill()
            os._exit(1)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handle, number)
    return stop


def raise_file_limit() -> None:
    """Raise the limit of open files: a shell usually allows 1,024, and each connection needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(_MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS has a lower limit that it does not report
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _announce(line: str, url: str, model: str) -> None:
    if log_format_in_use() == "json":
        logger.info(line, extra={"fields": {"url": url, "model": model}})
    else:
        print(line, flush=True)


def ready_line(url: str, model: str, info: ModelInfo) -> str:
    facts = [f"model {model}", info.device, info.dtype]
    if info.weight_bytes:
        bits = 8 * info.weight_bytes / max(1, info.num_parameters)
        size = f"{info.weight_bytes / 1e9:.2f} GB" if info.weight_bytes >= 1e8 else f"{info.weight_bytes / 1e6:.0f} MB"
        facts.append(f"weights {size} at {bits:.1f} bits")
    if info.kv_cache_tokens:
        facts.append(f"KV cache {info.kv_cache_tokens:,} tokens")
    return f"vlmserve is ready: {url} ({', '.join(facts)})"
