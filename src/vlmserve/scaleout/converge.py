"""Bring workers that join late or were away to the cluster's adapters.

A gateway has each worker make the changes that it lacks. A worker makes a change once, so several gateways may ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from vlmserve.scaleout.changes import Change, Changes
from vlmserve.scaleout.messages import ADAPTERS_PATH, Hello, MakeChange, Offer
from vlmserve.scaleout.upstream import Upstream, UpstreamError

logger = logging.getLogger(__name__)

_TIMEOUT = 600.0
"""Timeout in seconds for a worker to read an adapter's files."""
_HEARD = 3.0
"""Timeout in seconds for a worker to report a change that it has made."""
FIRST_PAUSE, LAST_PAUSE = 1.0, 60.0
"""Seconds between two attempts at a change."""


class Outcome(NamedTuple):
    worker: str
    status: int
    said: str
    """The text of the answer, or the reason that there is none."""


class ClusterAdapters:
    """The changes that a gateway knows, by model. heard: returns when a worker reports something new."""

    def __init__(self, gateway: str, heard: Callable[[], Awaitable[None]]) -> None:
        self._gateway = gateway
        self._heard = heard
        self._changes: dict[str, Changes] = {}
        self._asking: set[Change] = set()
        """Changes that a client is waiting for; `catch_up` leaves them to the client's request."""
        self._catching_up: dict[str, asyncio.Task[None]] = {}
        """By worker URL."""

    def new(self, model: str, name: str, path: str | None, mixture: str | None) -> Change:
        now = self._of(model).time_after(time.time_ns())
        return Change(now, self._gateway, name, path, mixture or "")

    def hear(self, model: str, changes: Iterable[Change]) -> None:
        known = self._of(model)
        for change in changes:
            known.add(change)

    def loaded(self, model: str) -> frozenset[str]:
        return self._of(model).loaded

    def of_unloaded_model(self, model: str, listed: Iterable[str]) -> list[str]:
        """listed: adapters in the model's settings."""
        known = self._of(model)
        return sorted({*listed, *known.loaded} - known.unloaded)

    def outdated(self, member: Member) -> frozenset[str]:
        """Adapters that a worker lacks or has in an older version."""
        return frozenset(change.adapter for change in self._missing(member))

    def catch_up(self, members: Collection[Member]) -> None:
        """Have workers make the changes that they lack. Returns at once."""
        for member in members:
            task = self._catching_up.get(member.url)
            if (task is None or task.done()) and self._missing(member):
                self._catching_up[member.url] = asyncio.ensure_future(self._catch_up(member))

    def leave(self, url: str) -> None:
        if (task := self._catching_up.pop(url, None)) is not None:
            task.cancel()

    @contextlib.contextmanager
    def asking(self, change: Change) -> Iterator[None]:
        """Keep `catch_up` from asking for a change that a client waits for."""
        self._asking.add(change)
        try:
            yield
        finally:
            self._asking.discard(change)

    async def made(self, members: Collection[Member], change: Change) -> None:
        """Wait `_HEARD` seconds at most until workers have reported a change."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HEARD):
                while any(change in self._missing(member) for member in members):
                    await self._heard()

    def _of(self, model: str) -> Changes:
        return self._changes.setdefault(model, Changes())

    def _missing(self, member: Member) -> Sequence[Change]:
        if member.hello is None or member.hello.info.draining:
            return ()
        return self._of(member.hello.facts.names[0]).missing_in(member.made)

    async def _catch_up(self, member: Member) -> None:
        pause = FIRST_PAUSE
        while missing := [change for change in self._missing(member) if change not in self._asking]:
            outcomes = [await ask(member, change, force=True) for change in missing]
            failed = [one for one in outcomes if one.status != HTTPStatus.OK]
            for change, one in zip(missing, outcomes, strict=True):
                if one.status == HTTPStatus.OK:
                    await self.made([member], change)
            if failed:
                logger.warning("The worker %s lacks %d adapters: %s", failed[0].worker, len(failed), failed[0].said)
                await asyncio.sleep(pause)
                pause = min(LAST_PAUSE, 2 * pause)


async def ask(member: Member, change: Change, *, force: bool, headers: Sequence[tuple[str, str]] = ()) -> Outcome:
    """force: replace or unload whatever has that name."""
    assert member.hello is not None
    name = member.hello.info.name
    body = msgspec.json.encode(MakeChange(change, force))
    try:
        asking = member.upstream.request("POST", ADAPTERS_PATH, [("content-type", "application/json"), *headers], body)
        async with asyncio.timeout(_TIMEOUT), asking as answer:
            said = await answer.read_all()
    except UpstreamError as error:
        return Outcome(name, HTTPStatus.BAD_GATEWAY, f"it does not answer: {error}")
    except TimeoutError:
        return Outcome(name, HTTPStatus.BAD_GATEWAY, f"it does not answer within {_TIMEOUT:.0f} s")
    return Outcome(name, answer.status, said.decode() if answer.status == HTTPStatus.OK else _message(said))


def _message(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body.decode(errors="replace")


@dataclass
class Member:
    url: str
    upstream: Upstream
    listening: asyncio.Task[None] | None = None
    hello: Hello | None = None
    """None until it has answered."""
    offer: Offer | None = None
    """The latest offer of a worker of several models."""
    made: Changes = field(default_factory=Changes)
    """Changes of adapters that the worker has made."""
    is_heard: bool = False
