"""A worker of several models: it offers them to gateways, and loads what these ask for.

Each loaded model is a process and a worker itself, so requests go directly there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from vlmserve.engine.preload import Preloader, fork_children_from
from vlmserve.errors import UnknownModelError, VLMServeError
from vlmserve.garbage import freeze_loaded_objects
from vlmserve.scaleout.door import BEAT, is_of_gateway, strangers_response
from vlmserve.scaleout.feed import follow
from vlmserve.scaleout.launch import MemberProcess
from vlmserve.scaleout.member_messages import HostLaunch, News, Up, WorkerLaunch
from vlmserve.scaleout.messages import (
    FEED_PATH,
    MODELS_PATH,
    TOKEN_HEADER,
    Beat,
    FeedMessage,
    LoadModel,
    Offer,
    OfferedModel,
)
from vlmserve.scaleout.ondemand.app import pool_metrics
from vlmserve.scaleout.ondemand.catalogue import Listed, budget_of, check_names
from vlmserve.scaleout.ondemand.pool import Model, Pool
from vlmserve.scaleout.ondemand.shelf import Shelf
from vlmserve.scaleout.settings import ModelsConfig
from vlmserve.scaleout.upstream import Upstream, UpstreamError
from vlmserve.server.body import BodyMemory, read_body
from vlmserve.server.connection import unless_disconnected
from vlmserve.server.errors import error_response
from vlmserve.server.run import bind, event_loop_factory, quiet_logs, raise_file_limit, stop_on_signals
from vlmserve.server.streams import LINES, EventStream
from vlmserve.server.web import WebServer
from vlmserve.settings.config import EngineConfig, MediaConfig, ServerConfig

logger = logging.getLogger(__name__)

_LOOK = 0.05
"""Seconds between checks whether the offer has changed."""
_PAUSE = 0.1
"""Seconds between attempts to connect to a model's process."""
_MOST_BYTES, _MOST_ASKED = 64 * 1024, 100
"""Maximum bytes of a gateway's request, and of that many together."""
PING_SECONDS = 30.0
"""Seconds between pings to a gateway that uses a model: writes fail some minutes after its machine is gone."""
_EXTRA_GRACE = 10.0
"""Seconds that processes get to end after their requests."""


class Host:
    """Use it from one event loop. name: kept across restarts. start: starts a model's process."""

    def __init__(
        self,
        name: str,
        token: str,
        listed: Sequence[Listed],
        shelf: Shelf,
        start: Callable[[WorkerLaunch], MemberProcess],
        *,
        load_timeout: float,
        address: str,
    ) -> None:
        self._name, self._token, self._created = name, token, int(time.time())
        self.pool = Pool(
            listed, shelf, start, self._follow_all, token, load_timeout=load_timeout, host=address, prefix=f"{name}/"
        )
        self._following: dict[str, asyncio.Task[None]] = {}
        """By the URL of a model's process."""
        self._estimating = asyncio.ensure_future(self.pool.estimate_local())
        self._bodies = BodyMemory(_MOST_ASKED * _MOST_BYTES)
        self._is_closing = False

    def offer(self) -> Offer:
        room = self.pool.shelf.budget - self.pool.shelf.used
        return Offer(self._name, self._created, max(0, room), tuple(map(_offered, self.pool.models.values())))

    async def feed(self) -> AsyncGenerator[bytes, None]:
        """Offers, when they change and every `BEAT` seconds."""
        loop = asyncio.get_running_loop()
        while not self._is_closing:
            offer, until = self.offer(), loop.time() + BEAT
            yield msgspec.json.encode(offer) + b"\n"
            lasting = _lasting(offer)
            while not self._is_closing and loop.time() < until and _lasting(self.offer()) == lasting:
                await asyncio.sleep(_LOOK)

    async def load(self, request: Request, held: contextlib.ExitStack) -> None:
        """Load the model that a gateway names, and keep it until `held` closes. Raises VLMServeError."""
        with self._bodies.share() as share:
            model = msgspec.json.decode(await read_body(request, _MOST_BYTES, share), type=LoadModel).model
        if model not in self.pool.models:
            raise UnknownModelError(f"There is no model {model!r:.100} here", param="model")
        held.callback(self.pool.leave, await unless_disconnected(request, self.pool.enter(model)))

    async def close(self, grace: float) -> None:
        """Let requests finish for at most `grace` seconds, and end all processes."""
        self._is_closing = True
        self._estimating.cancel()
        await self.pool.close(grace)
        self._follow_all(())

    def _follow_all(self, urls: Collection[str]) -> None:
        for url in self._following.keys() - set(urls):
            self._following.pop(url).cancel()
        names = {model.url: name for name, model in self.pool.models.items()}
        for url in set(urls) - self._following.keys():
            self._following[url] = asyncio.ensure_future(self._follow(names[url], url))

    async def _follow(self, name: str, url: str) -> None:
        """Learn which requests gateways send to a model."""

        def hear(message: FeedMessage) -> None:
            if isinstance(message, Beat):
                load = message.load
                running = load.running or int(not load.idle_seconds)
                self.pool.report(name, running, load.idle_seconds)

        upstream = Upstream(url, {TOKEN_HEADER: self._token})
        while True:
            with contextlib.suppress(UpstreamError, TimeoutError, msgspec.MsgspecError):
                await follow(upstream, self._name, hear)
            await asyncio.sleep(_PAUSE)


def _offered(model: Model) -> OfferedModel:
    slot, listed = model.slot, model.listed
    is_loaded = slot is not None and slot.state == "loaded"
    return OfferedModel(
        listed.name,
        listed.names,
        model.state,
        size=0 if slot is None else slot.size,
        url=(model.url or "") if slot is not None and slot.state in ("loaded", "unloading") else "",
        draining=slot is not None and slot.is_draining,
        users=len(model.waiting) + (0 if slot is None else slot.users + slot.running),
        idle_seconds=time.monotonic() - slot.last_use if slot is not None and is_loaded else 0.0,
        progress=model.progress if model.state == "loading" else "",
        reason=model.failure if model.state == "failed" else "",
        shown=listed.shown,
        adapters=listed.adapters,
    )


def _lasting(offer: Offer) -> Offer:
    """Return the part of an offer that gateways hear at once when it changes."""
    models = tuple(msgspec.structs.replace(one, users=0, idle_seconds=0.0) for one in offer.models)
    return msgspec.structs.replace(offer, models=models)


def create_app(host: Host, token: str) -> ASGIApp:
    async def feed(request: Request) -> Response:
        return StreamingResponse(host.feed(), media_type=LINES)

    async def load(request: Request) -> Response:
        held = contextlib.ExitStack()
        try:
            await host.load(request, held)
        except VLMServeError as error:
            return error_response(error, MODELS_PATH)
        return EventStream(_nothing(), held, PING_SECONDS, media_type=LINES)

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(pool_metrics(host.pool), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def health(request: Request) -> Response:
        return PlainTextResponse("ok")

    routes = [Route(FEED_PATH, feed), Route(MODELS_PATH, load, methods=["POST"]), Route("/metrics", metrics)]
    app = Starlette(routes=[*routes, Route("/health", health)])
    secret = token.encode()

    async def admit(scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or scope["path"] in ("/health", "/metrics")
        if is_open or is_of_gateway(Headers(scope=scope), secret):
            with contextlib.suppress(ClientDisconnect):
                await app(scope, receive, send)
        else:
            await strangers_response(scope["path"])(scope, receive, send)

    return admit


async def _nothing() -> AsyncGenerator[bytes, None]:
    await asyncio.Event().wait()
    yield b""


def run_host(launch: HostLaunch, say: Callable[[News], None]) -> None:
    """Offer models until SIGTERM. Raises VLMServeError."""
    server = ServerConfig.model_validate_json(launch.server)
    config = ModelsConfig.model_validate_json(launch.models)
    listed = [
        Listed(
            one.name,
            EngineConfig.model_validate_json(one.engine),
            MediaConfig.model_validate_json(one.media),
            ServerConfig.model_validate_json(one.server),
        )
        for one in launch.listed
    ]
    quiet_logs(server)
    check_names(listed)
    raise_file_limit()
    shelf = Shelf(budget_of(listed, config), config.models_patience)
    with contextlib.ExitStack() as stack:
        listener = bind(server)
        stack.callback(listener.close)
        if sys.platform == "linux":
            preloader = Preloader()
            stack.callback(preloader.close)
            fork_children_from(preloader.address)

        async def run() -> None:
            host = Host(
                launch.name, launch.token, listed, shelf, MemberProcess,
                load_timeout=config.models_load_timeout, address=server.host,
            )  # fmt: skip
            stop = stop_on_signals(host.pool.kill)
            web = WebServer(create_app(host, launch.token), server, listener)
            web.start()
            say(Up(web.url))
            try:
                await stop.wait()
            finally:
                await host.close(server.shutdown_grace + _EXTRA_GRACE)
                await web.stop()

        freeze_loaded_objects()
        with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
            runner.run(run())
