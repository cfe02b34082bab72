"""Middleware of a worker's server: it admits only gateways, and reports on every answer to them."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Container
from http import HTTPStatus

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlmserve.errors import VLMServeError
from vlmserve.scaleout.changes import Change, Changes
from vlmserve.scaleout.fleet import tag_of
from vlmserve.scaleout.lost import store_lost
from vlmserve.scaleout.messages import (
    ADAPTERS_PATH,
    BACKGROUND_HEADER,
    CLIENT_HEADER,
    FEED_PATH,
    LOAD_PATH,
    LOST_PATH,
    OWNER_HEADER,
    PROMPT_HEADER,
    ROUTE_HEADER,
    SEED_HEADER,
    TENANT_HEADER,
    TOKEN_HEADER,
    AdapterFacts,
    Beat,
    Begun,
    Ended,
    Feedback,
    FeedMessage,
    HeldPrompt,
    Hello,
    Load,
    MakeChange,
    ModelFacts,
    WorkerInfo,
)
from vlmserve.scaleout.pace import Pace
from vlmserve.server.body import read_body
from vlmserve.server.errors import RefusedError, error_response, json_response
from vlmserve.server.generation import Generation
from vlmserve.server.guard import TENANT
from vlmserve.server.history import OWNER
from vlmserve.server.hop import Hop, set_hop
from vlmserve.server.routes.adapters import load, unload
from vlmserve.server.routes.answering import BACKGROUND
from vlmserve.server.schema.models import LoadAdapterRequest, UnloadAdapterRequest
from vlmserve.server.service import Service

BEAT = 0.5
"""Maximum seconds between two messages of a worker."""
_LOOK = 0.05
"""Seconds between checks whether the worker still takes requests."""
_MOST_MESSAGES = 10_000
"""Maximum messages queued for a gateway; more are dropped."""
_OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/version", "/metrics"})
"""Probes and metrics, open to everybody."""
_MOST_BYTES = 64 * 1024


def is_of_gateway(headers: Headers, token: bytes) -> bool:
    return hmac.compare_digest(headers.get(TOKEN_HEADER, "").encode(), token)


def strangers_response(path: str) -> Response:
    message = "This is a worker of a cluster; send requests to its gateway"
    return error_response(RefusedError(HTTPStatus.FORBIDDEN, message, "not_a_gateway"), path)


class Door:
    """name: kept across restarts. token: proves that a request comes from a gateway."""

    def __init__(self, app: ASGIApp, service: Service, *, name: str, token: str, capacity: int) -> None:
        self._app, self._service, self._name, self._capacity = app, service, name, capacity
        self._token = token.encode()
        self._id = secrets.token_hex(8)
        self._tag = tag_of(name)
        self._feeds: dict[str, asyncio.Queue[FeedMessage]] = {}
        self._prompts: dict[str, deque[HeldPrompt]] = {}
        """By gateway: prompts that other gateways sent here, to be reported with the next beat."""
        self._pace = Pace()
        self._made = MadeChanges(service)
        self._engine: object = None
        self._epoch = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if not is_of_gateway(headers, self._token):
            if scope["path"] in _OPEN_PATHS:
                await self._app(scope, receive, send)
            else:
                await strangers_response(scope["path"])(scope, receive, send)
        elif scope["path"] == FEED_PATH:
            feed = self._feed(headers.get(ROUTE_HEADER, ""))
            await StreamingResponse(feed, media_type="application/x-ndjson")(scope, receive, send)
        elif scope["path"] == LOAD_PATH:
            load = msgspec.structs.replace(self.load(), queued_seconds=self._pace.mean_queued_seconds())
            await json_response(load)(scope, receive, send)
        elif scope["path"] in (LOST_PATH, ADAPTERS_PATH):
            request = Request(scope, receive)
            try:
                if scope["path"] == LOST_PATH:
                    response = await store_lost(self._service, request, headers.get(OWNER_HEADER, ""))
                else:
                    response = await self._made.answer(request)
                    for gateway in self._feeds:
                        self.tell(gateway, Beat(self.load()))
            except VLMServeError as error:
                response = error_response(error, scope["path"])
            await response(scope, receive, send)
        else:
            await self._pass(scope, receive, send, headers)

    async def _pass(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        scope[OWNER] = headers.get(OWNER_HEADER, "")
        scope[BACKGROUND] = BACKGROUND_HEADER in headers
        if address := headers.get(CLIENT_HEADER):
            scope["client"] = address, 0
        if tenant := headers.get(TENANT_HEADER):
            scope[TENANT] = bytes.fromhex(tenant)
        gateway, _, number = headers.get(ROUTE_HEADER, "").partition(".")
        watch = _Watch(self, gateway, int(number or 0), headers.get(PROMPT_HEADER, ""))
        set_hop(scope, Hop(int(headers.get(SEED_HEADER, "0")), self._tag, watch.start))

        held: list[Message] = []

        async def send_watched(message: Message) -> None:
            # Hold everything before the first token, while another worker may still answer.
            held.append(message)
            if watch.see() or not message.get("more_body", message["type"] == "http.response.start"):
                for one in held:
                    await send(one)
                held.clear()

        try:
            await self._app(scope, receive, send_watched)
        finally:
            watch.end()

    @property
    def epoch(self) -> str:
        """Changes with every engine start."""
        engine = self._service.info
        if engine is not None and engine is not self._engine:
            self._engine, self._epoch = engine, secrets.token_hex(4)
            for prompts in self._prompts.values():
                prompts.clear()
        return self._epoch

    def load(self) -> Load:
        pace = self._pace
        running, idle = self._service.num_answers, self._service.demand.idle_seconds
        return Load(self.epoch, running, pace.queued_seconds, pace.token_seconds, pace.image_seconds, idle)

    def tell(self, gateway: str, message: FeedMessage) -> None:
        if (feed := self._feeds.get(gateway)) is not None and not feed.full():
            feed.put_nowait(message)

    def tell_others(self, gateway: str, prompt: HeldPrompt) -> None:
        """Report a prompt to the other gateways with the next beat."""
        for other, prompts in self._prompts.items():
            if other != gateway:
                prompts.append(prompt)

    def hello(self) -> Hello:
        service = self._service
        stats, engine = service.engine_stats(), service.info
        phase = service.phase
        worker = WorkerInfo(
            self._id,
            self._name,
            "",
            service.names.all,
            self.epoch,
            self._capacity,
            engine.kv_cache_tokens if stats is not None and engine is not None else 0,
            draining=phase == "closing" or (phase != "asleep" and stats is None),
        )
        adapters = {
            name: AdapterFacts() if adapter is None else AdapterFacts(adapter.digest, tuple(adapter.mixes))
            for name, adapter in service.names.adapter_infos()
        }
        made = self._made.now(adapters)
        facts = ModelFacts(service.names.own, service.created, service.abilities, adapters, made)
        return Hello(worker, facts)

    async def _feed(self, gateway: str) -> AsyncGenerator[bytes, None]:
        queue = self._feeds[gateway] = asyncio.Queue(_MOST_MESSAGES)
        prompts = self._prompts[gateway] = deque(maxlen=_MOST_MESSAGES)
        encode = msgspec.json.Encoder().encode
        told: Hello | None = None
        news: list[FeedMessage] = []
        try:
            while True:
                if (hello := self.hello()) != told:
                    news.insert(0, hello)
                    told = hello
                news.append(Beat(self.load(), tuple(prompts)))
                prompts.clear()
                yield b"".join(encode(line) + b"\n" for line in news)
                if self._service.phase == "closing" and not self._service.num_answers and queue.empty():
                    return
                news = await self._news(queue)
        finally:
            if self._feeds.get(gateway) is queue:
                del self._feeds[gateway], self._prompts[gateway]

    async def _news(self, queue: asyncio.Queue[FeedMessage]) -> list[FeedMessage]:
        """Wait for messages, a new phase or `BEAT` seconds."""
        loop = asyncio.get_running_loop()
        until, before = loop.time() + BEAT, self._service.phase
        news: list[FeedMessage] = []
        while not news and loop.time() < until and self._service.phase == before:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK):
                    news.append(await queue.get())
        while not queue.empty():
            news.append(queue.get_nowait())
        return news


class _Watch:
    """Reports the progress of one request to its gateway.

    prompt: hexadecimal digests of the prompt and of its images, separated by commas.
    """

    def __init__(self, door: Door, gateway: str, route: int, prompt: str) -> None:
        self._door, self._gateway, self._route, self._prompt = door, gateway, route, prompt
        self._generation: Generation | None = None
        self._has_begun = False

    def start(self, generation: Generation) -> None:
        self._generation = generation
        self._door._pace.wait(self, generation)

    def see(self) -> bool:
        """Returns whether the answer has a token."""
        if self._generation is None:
            return True
        if not self._has_begun and any(answer.ttft is not None for answer in self._generation.answers):
            self._begin(self._generation)
        return self._has_begun

    def end(self) -> None:
        if self._generation is None:
            return
        self.see()
        self._door._pace.leave(self)
        self._door.tell(self._gateway, Ended(self._route, self._feedback(self._generation)))
        self._generation = None

    def _begin(self, generation: Generation) -> None:
        self._has_begun = True
        self._door._pace.begin(self, generation)
        feedback = self._feedback(generation)
        self._door.tell(self._gateway, Begun(self._route, feedback))
        if self._prompt:
            digest, *images = (bytes.fromhex(one) for one in self._prompt.split(","))
            added = feedback.prompt_tokens - feedback.cached_tokens
            self._door.tell_others(self._gateway, HeldPrompt(digest, tuple(images), added))

    def _feedback(self, generation: Generation) -> Feedback:
        usage = generation.usage
        details = usage.prompt_tokens_details
        stored = generation.id if generation.id.startswith("resp_") else None
        return Feedback(
            self._door.load(),
            usage.prompt_tokens,
            details.cached_tokens,
            details.images,
            details.images_encoded,
            usage.completion_tokens,
            stored,
        )


class MadeChanges:
    """Loads and unloads adapters at a gateway's request, and remembers it."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._changes = Changes()
        self._locks: dict[str, asyncio.Lock] = {}

    def now(self, served: Container[str]) -> tuple[Change, ...]:
        """Changes that still hold: a restarted engine may have failed to load an adapter. served: names of all
        adapters."""
        return tuple(
            change
            for change in self._changes
            if change.adapter in served or (change.part is None and change.path is None)
        )

    async def answer(self, request: Request) -> Response:
        """Raises VLMServeError."""
        service = self._service
        service.check_serving()
        with service.bodies.share() as share, service.demand.in_use():
            asked = msgspec.json.decode(await read_body(request, _MOST_BYTES, share), type=MakeChange)
            await service.wake()
            return PlainTextResponse(await self._make(asked.change, force=asked.force))

    async def _make(self, change: Change, *, force: bool) -> str:
        async with self._locks.setdefault(change.adapter, asyncio.Lock()):
            known = Changes(self.now({name for name, _ in self._service.names.adapter_infos()}))
            if not known.is_news(change):
                if change in known:
                    return "Nothing to change."
                message = f"{change.adapter!r} was changed again in the meantime"
                raise RefusedError(HTTPStatus.CONFLICT, message, "changed_meanwhile")
            said = await self._apply(change, force=force)
            self._changes.add(change)
            return said

    async def _apply(self, change: Change, *, force: bool) -> str:
        mixture = change.mixture or None
        if change.path is not None:
            body = LoadAdapterRequest(lora_name=change.name, lora_path=change.path, load_inplace=force, mixture=mixture)
            return await load(self._service, body)
        if force and self._is_unloaded(change):
            return "Nothing to change."
        return await unload(self._service, UnloadAdapterRequest(lora_name=change.name, mixture=mixture))

    def _is_unloaded(self, change: Change) -> bool:
        served = self._service.client.calls.adapters
        if change.mixture:
            return change.mixture in served and change.name not in served[change.mixture].mixes
        return change.name not in served
