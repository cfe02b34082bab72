"""A gateway's view of workers of several models: have them load what requests name."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from http import HTTPStatus
from typing import Any

import msgspec

from vlmserve.errors import UnavailableError
from vlmserve.scaleout.converge import Member
from vlmserve.scaleout.messages import MODELS_PATH, LoadModel, ModelFacts, Offer, OfferedModel
from vlmserve.scaleout.upstream import Answer, Upstream, UpstreamError

SILENCE = 30.0
"""Seconds that requests wait for a loaded model whose process does not respond."""
_MOST_CRASHES = 2
"""Loaded processes of one worker that may end before a request is sent there."""
_LOOK = 1.0
"""Seconds between checks whether a worker that loads a model still responds."""
_BEST_FIRST = ("loaded", "loading", "unloading", "unloaded", "failed")


class Hosts:
    """Workers that load models on demand. members: all members by URL."""

    def __init__(self, members: Mapping[str, Member]) -> None:
        self._members = members
        self._asked: Counter[tuple[str, str]] = Counter()
        """Requests that wait for an answer, by the worker's URL and the model."""
        self.models: dict[str, OfferedModel] = {}
        """One offer of each model, by name: the one in the best state."""
        self.names: dict[str, str] = {}
        """Models by each of their names."""
        self.urls: frozenset[str] = frozenset()
        """Addresses of loaded models."""
        self.draining: frozenset[str] = frozenset()
        """Addresses of loaded models that take no new requests."""
        self.created = 0
        self.facts: dict[str, ModelFacts] = {}
        """Facts about models that were loaded once, by name."""

    def hear(self, member: Member, offer: Offer) -> None:
        member.offer = offer
        self.update()

    def update(self) -> None:
        offers = [member.offer for member in self._members.values() if member.offer is not None]
        every = sorted((one for offer in offers for one in offer.models), key=lambda one: _BEST_FIRST.index(one.state))
        self.models = {one.name: one for one in reversed(every)}
        self.names = {alias: one.name for one in reversed(every) for alias in one.names} | {
            name: name for name in self.models
        }
        self.urls = frozenset(one.url for one in every if one.url)
        self.draining = frozenset(one.url for one in every if one.draining)
        self.created = max((offer.created for offer in offers), default=0)

    async def load(self, model: str, held: contextlib.ExitStack, responds: Callable[[], Awaitable[bool]]) -> None:
        """Have a worker load a model, and keep it loaded until `held` closes.

        Ask another worker if one fails. responds: waits for the model's process. Raises UnavailableError.
        """
        failed: Counter[str] = Counter()
        error = UnavailableError(f"No worker can load {model} now; try again soon")
        while (
            host := self._choose(model, [url for url, times in failed.items() if times >= _MOST_CRASHES])
        ) is not None:
            held.close()
            try:
                await self._ask(host, model, held)
                if await responds():
                    return
                failed[host.url] += 1
                error = UnavailableError(f"{model} does not respond; try again soon")
            except UnavailableError as reason:
                failed[host.url] = _MOST_CRASHES
                error = reason
        raise error

    @property
    def heard(self) -> list[tuple[str, Upstream]]:
        return [
            (member.offer.name, member.upstream)
            for member in self._members.values()
            if member.offer is not None and member.is_heard
        ]

    def can_load(self, model: str) -> bool:
        """Return whether a worker that answers offers a model."""
        return any(host.is_heard for host, _ in self._offers_of(model))

    def has_loaded(self, model: str) -> bool:
        return model in self.models and self.models[model].state == "loaded"

    def waiting_comment(self, model: str) -> bytes | None:
        """The state of a model, for a stream that waits; None while it is loaded."""
        offered = self.models.get(model)
        if offered is None or (offered.state == "loaded" and not offered.draining):
            return None
        return waiting_comment(model, is_loading=offered.state == "loading", progress=offered.progress)

    def _choose(self, model: str, failed: Collection[str]) -> Member | None:
        """Prefer a worker that loads the model already, then one with room, then the one whose models to unload have
        been idle for longest, then the least busy one."""

        def cost(host: Member, offered: OfferedModel) -> tuple[Any, ...]:
            assert host.offer is not None
            is_asked = self._asked[host.url, model] > 0
            if (offered.state in ("loaded", "loading") and not offered.draining) or is_asked:
                return 0, host.url
            users = sum(one.users for one in host.offer.models)
            lacking = offered.size - self._room(host.offer, host.url)
            has_failed = offered.state == "failed"
            if lacking <= 0:
                return 1, has_failed, users, -(self._room(host.offer, host.url))
            idle = _idle_seconds(host.offer, lacking)
            return (2, has_failed, -idle, users) if idle is not None else (3, has_failed, users, lacking)

        found = [
            (cost(host, offered), host)
            for host, offered in self._offers_of(model)
            if host.is_heard and host.url not in failed
        ]
        return min(found, key=lambda one: one[0])[1] if found else None

    def _offers_of(self, model: str) -> Iterator[tuple[Member, OfferedModel]]:
        for member in self._members.values():
            for offered in () if member.offer is None else member.offer.models:
                if offered.name == model:
                    yield member, offered

    def _room(self, offer: Offer, url: str) -> int:
        """Free bytes, less the size of models that this gateway has asked for."""
        return offer.room - sum(
            one.size for one in offer.models if self._asked[url, one.name] > 0 and one.state in ("unloaded", "failed")
        )

    async def _ask(self, host: Member, model: str, held: contextlib.ExitStack) -> None:
        """Raises UnavailableError."""
        loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        holding = asyncio.ensure_future(self._hold(host, model, loaded))
        held.callback(holding.cancel)
        key = host.url, model
        self._asked[key] += 1
        try:
            while not loaded.done():
                await asyncio.wait((loaded,), timeout=_LOOK)
                if not loaded.done() and not host.is_heard:
                    raise UnavailableError(f"The worker that was loading {model} does not respond; try again soon")
            loaded.result()
        finally:
            loaded.cancel()
            self._asked[key] -= 1
            if not self._asked[key]:
                del self._asked[key]

    async def _hold(self, host: Member, model: str, loaded: asyncio.Future[None]) -> None:
        """Keep an answer open. loaded: done when it begins."""
        body, headers = msgspec.json.encode(LoadModel(model)), [("content-type", "application/json")]
        try:
            async with host.upstream.request("POST", MODELS_PATH, headers, body) as answer:
                if answer.status != HTTPStatus.OK:
                    raise await _refusal(answer, model)
                if not loaded.done():
                    loaded.set_result(None)
                await answer.read_all()
        except (UpstreamError, UnavailableError) as error:
            if not loaded.done():
                lost = UnavailableError(f"The worker that was loading {model} is gone; try again soon")
                loaded.set_exception(error if isinstance(error, UnavailableError) else lost)


def waiting_comment(model: str, *, is_loading: bool, progress: str) -> bytes:
    """A comment for a stream that waits for a load, or for memory."""
    news = {"state": "loading" if is_loading else "waiting", "model": model}
    return b": " + msgspec.json.encode({**news, **({"progress": progress} if progress else {})}) + b"\n\n"


def _idle_seconds(offer: Offer, lacking: int) -> float | None:
    """Seconds since any of the models was used that leave `lacking` bytes; None: too few models are idle."""
    idle = [one for one in offer.models if one.state == "loaded" and not one.users]
    for one in sorted(idle, key=lambda one: -one.idle_seconds):
        lacking -= one.size
        if lacking <= 0:
            return one.idle_seconds
    return None


async def _refusal(answer: Answer, model: str) -> UnavailableError:
    headers, said = dict(answer.headers), await answer.read_all()
    with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError, ValueError):
        message = str(msgspec.json.decode(said)["error"]["message"])
        return UnavailableError(message, retry_after=float(headers.get(b"retry-after", b"1")))
    return UnavailableError(f"A worker could not load {model}; try again soon")
