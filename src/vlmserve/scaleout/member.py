"""The process of one worker or gateway.

The first line of standard input has its settings, further lines workers' addresses for a gateway. Messages go to
standard output. After SIGTERM it finishes its requests; when standard input closes, the parent is gone and it ends at
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from vlmserve.errors import VLMServeError
from vlmserve.garbage import freeze_loaded_objects
from vlmserve.logs import level_number, set_up_logging
from vlmserve.scaleout.member_messages import (
    HANDED_OVER,
    Failed,
    GatewayLaunch,
    Launch,
    Loading,
    News,
    Up,
    WorkerLaunch,
)
from vlmserve.scaleout.settings import GatewayConfig
from vlmserve.settings.config import EngineConfig, MediaConfig, ServerConfig

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from vlmserve.scaleout.gateway import Gateway
    from vlmserve.scaleout.handover import Predecessor
    from vlmserve.server.service import Service
    from vlmserve.server.web import WebServer

logger = logging.getLogger(__name__)

_WORKERS_PATIENCE = 10.0
"""Seconds that a gateway waits for all workers before it takes over from another."""


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides when to stop
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=Launch)
    server = ServerConfig.model_validate_json(launch.server)
    process = "gateway" if isinstance(launch, GatewayLaunch) else launch.name
    set_up_logging(server.log_format, process, level_number(server.log_level))
    try:
        if isinstance(launch, GatewayLaunch):
            return run_gateway(launch, lambda url: _say(Up(url)))
        threading.Thread(target=_exit_with_parent, daemon=True).start()
        if isinstance(launch, WorkerLaunch):
            run_worker(launch, _say)
        else:
            from vlmserve.scaleout.ondemand.host import run_host

            run_host(launch, _say)
    except VLMServeError as error:
        _say(Failed(str(error), type(error).__name__))
        return 1
    return 0


def run_worker(launch: WorkerLaunch, say: Callable[[News], None]) -> None:
    """Serve one engine until SIGTERM. Raises VLMServeError."""
    from vlmserve.scaleout.door import Door
    from vlmserve.server.run import Membership, serve

    engine = EngineConfig.model_validate_json(launch.engine)

    def announce(url: str, service: Service) -> None:
        say(Up(url, service.client.process.pid))

    def wrap(app: ASGIApp, service: Service) -> ASGIApp:
        return Door(app, service, name=launch.name, token=launch.token, capacity=engine.max_num_seqs)

    media, server = MediaConfig.model_validate_json(launch.media), ServerConfig.model_validate_json(launch.server)
    serve(engine, media, server, Membership(wrap, announce, lambda text: say(Loading(text))))


def run_gateway(launch: GatewayLaunch, announce: Callable[[str], None]) -> int:
    """Returns the exit status. Raises VLMServeError."""
    from vlmserve.scaleout.app import create_app
    from vlmserve.scaleout.gateway import Gateway
    from vlmserve.scaleout.handover import predecessor_at
    from vlmserve.server.run import bind, event_loop_factory, quiet_logs, raise_file_limit
    from vlmserve.server.web import WebServer

    raise_file_limit()
    server = ServerConfig.model_validate_json(launch.server)
    quiet_logs(server)
    gateway = Gateway(server, GatewayConfig.model_validate_json(launch.gateway), launch.token)
    predecessor = predecessor_at(server, launch.token) if launch.takes_over else None
    listener = bind(server) if predecessor is None else predecessor.listener
    web = WebServer(create_app(gateway), server, listener)
    freeze_loaded_objects()
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        return runner.run(_serve(gateway, web, listener, predecessor, launch.token, announce))


async def _serve(
    gateway: Gateway,
    web: WebServer,
    listener: socket.socket,
    predecessor: Predecessor | None,
    token: str,
    announce: Callable[[str], None],
) -> int:
    from vlmserve.scaleout.handover import Offer

    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    threading.Thread(target=_read_workers, args=(gateway, loop), daemon=True).start()
    if predecessor is not None:
        await gateway.wait_for_workers(_WORKERS_PATIENCE)  # the predecessor still answers
    web.start()
    if predecessor is not None:
        await asyncio.to_thread(predecessor.release)
    with contextlib.closing(Offer(listener, token)) as offer:
        announce(web.url)
        taking, stopping = asyncio.ensure_future(offer.taken()), asyncio.ensure_future(stopped.wait())
        await asyncio.wait((taking, stopping), return_when=asyncio.FIRST_COMPLETED)
        grace, is_taken = gateway.config.shutdown_grace, taking.done()
        if is_taken:
            logger.info("Another gateway has taken over; finishing %d requests", gateway.num_in_flight)
            gateway.leave()
            leaving = asyncio.ensure_future(web.leave(grace))
        else:
            taking.cancel()
    if is_taken:
        await leaving
    await gateway.drain(0 if is_taken else grace)
    if gateway.num_in_flight:
        logger.warning("%d requests are not finished and fail now", gateway.num_in_flight)
    await web.stop()
    await gateway.close()
    return HANDED_OVER if is_taken else 0


def _read_workers(gateway: Gateway, loop: asyncio.AbstractEventLoop) -> None:
    decode = msgspec.json.Decoder(list[str]).decode
    for line in sys.stdin.buffer:
        loop.call_soon_threadsafe(gateway.set_workers, decode(line))
    os._exit(0)


def _exit_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(0)


def _say(news: News) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(news) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a normal exit would wait for the thread that reads standard input
