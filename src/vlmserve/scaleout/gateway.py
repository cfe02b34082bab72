"""The state of a gateway: known workers, what they reported, and requests in flight."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from vlmserve.errors import InvalidRequestError, UnavailableError, UnknownModelError, VLMServeError
from vlmserve.scaleout.absence import Absences
from vlmserve.scaleout.changes import Change, Changes
from vlmserve.scaleout.converge import ClusterAdapters, Member
from vlmserve.scaleout.feed import follow
from vlmserve.scaleout.hosts import SILENCE, Hosts
from vlmserve.scaleout.keys import RequestKey
from vlmserve.scaleout.limits import ClusterLimits
from vlmserve.scaleout.lost import LostResponses
from vlmserve.scaleout.messages import (
    TOKEN_HEADER,
    AdapterFacts,
    Beat,
    Begun,
    Ended,
    FeedMessage,
    Hello,
    ModelFacts,
    Offer,
    WorkerInfo,
)
from vlmserve.scaleout.metrics import GatewayMetrics
from vlmserve.scaleout.router import Route, Router
from vlmserve.scaleout.settings import GatewayConfig
from vlmserve.scaleout.upstream import Upstream, UpstreamError
from vlmserve.server.accounts import Account, KeyRing
from vlmserve.server.body import BodyMemory
from vlmserve.server.schema.ollama import LATEST
from vlmserve.server.service import open_tracing
from vlmserve.settings.config import ServerConfig

logger = logging.getLogger(__name__)

_FIRST_RETRY, _LAST_RETRY = 0.1, 1.0
"""Seconds between attempts to connect to a worker's feed."""
_NEWS = 2.0
"""Seconds in which a worker reports that it has loaded a model."""
ADAPTER_PATIENCE = 10.0
"""Default of `Gateway.patience`."""
_MOST_SETTLING = 100_000
"""Maximum requests that await a worker's report."""


@dataclass
class Model:
    router: Router
    facts: ModelFacts
    adapters: Mapping[str, AdapterFacts] = field(default_factory=dict)
    """Adapters that some workers have or should have."""
    lacking: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Ids of the workers that lack an adapter's latest version, by adapter."""


@dataclass
class Sent:
    route: Route
    account: Account | None
    """Pays for its tokens."""
    charged: int = 0


class Gateway:
    """Use it from one thread. token: the cluster's shared secret."""

    def __init__(self, server: ServerConfig, config: GatewayConfig, token: str) -> None:
        self.config = server
        self.settings = config
        self.keys = KeyRing.of(server)
        self.limits = None if self.keys is None else ClusterLimits.of(server)
        if self.keys is not None:
            self.keys.limits = self.limits
        self.tracing = open_tracing(server.otlp_traces_endpoint)
        self.max_body_bytes = min(server.max_body_bytes, server.body_memory)
        self.bodies = BodyMemory(server.body_memory)
        self.metrics = GatewayMetrics(
            lambda: [model.router.fleet for model in self.models.values()], lambda: self.num_in_flight
        )
        self.id = secrets.token_hex(8)
        self.members: dict[str, Member] = {}
        self.models: dict[str, Model] = {}
        self.hosts = Hosts(self.members)
        self.adapters = ClusterAdapters(self.id, self.change_of_worker)
        self.num_in_flight = 0
        self.patience = ADAPTER_PATIENCE
        """Maximum seconds that a request waits for a worker to load its adapter."""
        self.lost = LostResponses(lambda: self.heard, self.admit)
        self._told: frozenset[str] = frozenset()
        """Members that the directory knows."""
        self._names: dict[str, str] = {}
        self._absences = Absences()
        self._token = token
        self._numbers = itertools.count(1)
        self._sent: OrderedDict[int, Sent] = OrderedDict()
        self._phase = "serving"
        self._changed = asyncio.Event()
        """Set when a worker reports something new."""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def phase(self) -> str:
        """ "serving", "leaving" or "closing" (`Front.phase`)."""
        return self._phase

    @property
    def max_logprobs(self) -> int | None:
        """The number that all models support."""
        known = [model.facts.abilities for model in self.models.values()]
        return min((one.max_logprobs for one in known if one is not None), default=None)

    def problem(self) -> VLMServeError | None:
        if self._phase == "closing":
            return UnavailableError("The gateway is shutting down")
        if not self.hosts.models and not any(len(model.router.fleet) for model in self.models.values()):
            return UnavailableError("No worker is ready yet; try again soon", retry_after=2.0)
        return None

    @property
    def heard(self) -> list[tuple[str, Upstream]]:
        return [
            (member.hello.info.name, member.upstream)
            for member in self.members.values()
            if member.hello is not None and member.is_heard
        ]

    def set_workers(self, urls: Collection[str]) -> None:
        self._told = frozenset(urls)
        gone = [member for url, member in self.members.items() if url not in self._told and member.offer is not None]
        for member in gone:
            self._lose(member)
            member.offer = None
        self.hosts.update()
        self._connect()

    def _connect(self) -> None:
        """Listen to the workers that the directory knows, and to the models that these have loaded."""
        urls = self._told | self.hosts.urls
        for url in urls - self.members.keys():
            member = self.members[url] = Member(url, Upstream(url, {TOKEN_HEADER: self._token}))
            member.listening = asyncio.ensure_future(self._listen(member))
        for url in self.members.keys() - urls:
            member = self.members.pop(url)
            member.is_heard = False
            if member.listening is not None:
                member.listening.cancel()
            member.upstream.close()
            self.adapters.leave(url)
            self.update_models()

    @property
    def known_models(self) -> Collection[str]:
        return self.models.keys() | self.hosts.models.keys()

    def model(self, name: object) -> tuple[str, Router]:
        """The model of a name and its router; without a name, the only model.

        Raises UnavailableError, UnknownModelError or InvalidRequestError.
        """
        own = self.own_name(name)
        if own not in self.models:
            raise UnavailableError(f"{own} is not loaded; a request to it loads it")
        return own, self.models[own].router

    def untagged(self, name: object) -> object:
        """Remove Ollama's default tag, unless a model's name has it."""
        return name.removesuffix(LATEST) if isinstance(name, str) and name not in self._names else name

    def own_name(self, name: object) -> str:
        """The model that a request means. Raises UnavailableError, UnknownModelError or InvalidRequestError."""
        if not (models := self.known_models):
            raise self.problem() or UnavailableError("No worker is ready yet; try again soon")
        if isinstance(name, str) and name in self._names:
            return self._names[name]
        if not isinstance(name, str) and len(models) == 1:
            return next(iter(models))  # the worker rejects a name of another type
        known = ", ".join(map(repr, sorted(models)))
        if not isinstance(name, str):
            raise InvalidRequestError(f"There are several models; name one of {known}", param="model")
        raise UnknownModelError(f"There is no model {name!r:.100} here, only {known}", param="model")

    async def await_worker(self, name: object, held: contextlib.ExitStack) -> None:
        """Wait if a model's last worker has just left. Have a worker load a model that none has loaded.

        name: the requested model or adapter; None: any worker will do. held: closes after the answer. Raises
        UnavailableError.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._absence(name)):
                while self._absence(name):
                    await self.change_of_worker()
        own = self._offered(name)
        if own is not None and not self.members_of(own):
            await self.hosts.load(own, held, functools.partial(self._responds, own))

    def absent(self, name: object) -> float:
        """Seconds that a request waits for a worker; 0 if there is one, or none is expected."""
        own = self._offered(name)
        if own is None or not self.hosts.can_load(own):
            return self._absence(name)
        return 0.0 if self.members_of(own) else SILENCE

    def _absence(self, name: object) -> float:
        """Seconds that a request waits for a worker in place of the last one, which has left."""
        own = self._names.get(name) if isinstance(name, str) else None
        return self._absences.left(name if own is None else own)

    def _offered(self, name: object) -> str | None:
        """The requested model if workers load it on demand. Without a name, the only model."""
        own = self._names.get(name) if isinstance(name, str) else None
        if name is None and len(known := self.known_models) == 1:
            own = next(iter(known))
        return own if own in self.hosts.models else None

    async def _responds(self, own: str) -> bool:
        """Wait for a loaded model's process. Returns False if it has ended, or is silent for too long."""
        known_by = time.monotonic() + _NEWS
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SILENCE):
                while not self.members_of(own) and (self.hosts.has_loaded(own) or time.monotonic() < known_by):
                    await self.change_of_worker()
        return bool(self.members_of(own))

    def unloaded_model(self, name: object) -> str | None:
        """The requested model if no worker has loaded it, but one could."""
        own = self._offered(name)
        return own if own is not None and not self.members_of(own) else None

    def adapters_of_unloaded(self, own: str) -> Sequence[str]:
        """Adapters that an unloaded model will have."""
        return self.adapters.of_unloaded_model(own, self.hosts.models[own].adapters)

    def waiting_comment(self, name: object) -> bytes | None:
        """A comment for a stream that waits; None: the usual ping."""
        own = self._offered(name)
        return None if own is None else self.hosts.waiting_comment(own)

    def lacking(self, name: object) -> Collection[str]:
        """Ids of the workers that lack the requested adapter."""
        model = self.models.get(self._names.get(name, "")) if isinstance(name, str) else None
        return () if model is None else model.lacking.get(str(name), ())

    def members_of(self, model: str) -> list[Member]:
        """Workers that answer and do not drain."""

        def is_one(member: Member) -> bool:
            hello = member.hello if member.is_heard else None
            is_full = hello is None or hello.info.draining or member.url in self.hosts.draining
            return hello is not None and hello.facts.names[0] == model and not is_full

        return [member for member in self.members.values() if is_one(member)]

    def learn(self, model: str, change: Change) -> None:
        self.adapters.hear(model, [change])
        self.update_models()
        self._catch_up(model)

    def any_model(self) -> tuple[str, Router]:
        """For requests that any worker can answer. Raises UnavailableError."""
        for name, model in self.models.items():
            if len(model.router.fleet):
                return name, model.router
        raise self.problem() or UnavailableError("No model is loaded; a request to one loads it")

    def send(
        self, router: Router, key: RequestKey, excluded: Collection[str], account: Account | None
    ) -> tuple[int, Route] | None:
        """Choose a worker, and number the request for its reports. None: no worker."""
        route = router.route(key, excluded)
        if route is None:
            return None
        number = next(self._numbers)
        self._sent[number] = Sent(route, account)
        if len(self._sent) > _MOST_SETTLING:
            self._sent.popitem(last=False)
        return number, route

    def forget(self, number: int) -> None:
        self._sent.pop(number, None)

    @contextlib.contextmanager
    def admit(self) -> Iterator[None]:
        self.num_in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_in_flight -= 1
            if not self.num_in_flight:
                self._idle.set()

    async def wait_for_workers(self, patience: float) -> None:
        """Wait until all workers have reported; `patience` seconds at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                while not self.members or not all(member.is_heard for member in self.members.values()):
                    await self.change_of_worker()

    def leave(self) -> None:
        """Have clients close their connections, because another gateway has taken over."""
        self._phase = "leaving"

    async def drain(self, grace: float) -> bool:
        """Reject new requests. Returns whether the others ended within `grace` seconds."""
        self._phase = "closing"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self._idle.wait()
        return self._idle.is_set()

    async def close(self) -> None:
        self.set_workers(())
        if self.limits is not None:
            await self.limits.close()
        if self.tracing is not None:
            self.tracing.close()

    async def _listen(self, member: Member) -> None:
        pause = _FIRST_RETRY
        while True:
            try:
                await follow(member.upstream, self.id, functools.partial(self.hear, member))
                pause = _LAST_RETRY  # it is leaving
            except (UpstreamError, TimeoutError, msgspec.MsgspecError) as error:
                if member.is_heard:
                    logger.warning("The worker at %s does not respond: %s", member.url, error)
            self._lose(member)
            await asyncio.sleep(pause)
            pause = min(_LAST_RETRY, 2 * pause)

    def hear(self, member: Member, message: FeedMessage) -> None:
        match message:
            case Hello(info, facts):
                member.hello = Hello(msgspec.structs.replace(info, url=member.url), facts)
                member.made = Changes(facts.changes)
                self.adapters.hear(facts.names[0], facts.changes)
                self.update_models()
                if not member.is_heard:
                    member.is_heard = True
                    logger.info("The worker %s at %s answers", info.name, member.url)
                fleet = self.models[facts.names[0]].router.fleet
                if (worker := fleet.get(info.id)) is not None:
                    fleet.heal(worker)
                self._note_absence(facts.names[0])
                self._catch_up(facts.names[0])
            case Offer():
                self._hear_offer(member, message)
            case Beat(load, prompts):
                if member.hello is not None and (model := self.models.get(member.hello.facts.names[0])) is not None:
                    model.router.report(member.hello.info.id, load, prompts)
            case Begun(number, feedback):
                if (sent := self._sent.get(number)) is not None:
                    sent.route.begin(feedback)
                    self._charge(sent, feedback.prompt_tokens)
                    self.metrics.count_tokens(feedback)
            case Ended(number, feedback):
                if (sent := self._sent.pop(number, None)) is not None:
                    sent.route.hear_end(feedback)
                    self._charge(sent, feedback.prompt_tokens + feedback.completion_tokens)

    def _hear_offer(self, member: Member, offer: Offer) -> None:
        is_back = not member.is_heard
        if is_back:
            member.is_heard = True
            logger.info("The worker %s at %s answers; it has %d models", offer.name, member.url, len(offer.models))
        before = self.hosts.names, self.hosts.urls, self.hosts.draining
        self.hosts.hear(member, offer)
        if before != (self.hosts.names, self.hosts.urls, self.hosts.draining):
            self._connect()
            self.update_models()
        if is_back:
            self._note_absences(offer)
        self._changed.set()

    def _charge(self, sent: Sent, tokens: int) -> None:
        if sent.account is not None:
            sent.account.charge(tokens - sent.charged)
        sent.charged = tokens

    def _lose(self, member: Member) -> None:
        if not member.is_heard:
            return
        member.is_heard = False
        if member.hello is None:
            if member.offer is not None:
                self._note_absences(member.offer)
            self._changed.set()
            return
        self.adapters.leave(member.url)
        router = self.models[member.hello.facts.names[0]].router
        if (worker := router.fleet.get(member.hello.info.id)) is not None:
            router.fleet.trip(worker, time.monotonic(), connection=True)
        self._note_absence(member.hello.facts.names[0])
        self._changed.set()

    def _note_absence(self, model: str) -> None:
        names = [name for name, own in self._names.items() if own == model]
        is_served = bool(self.members_of(model)) or self.hosts.can_load(model)
        self._absences.note(model, names, is_served=is_served)

    def _note_absences(self, offer: Offer) -> None:
        for offered in offer.models:
            self._note_absence(offered.name)

    def update_models(self) -> None:
        self._changed.set()
        workers: dict[str, list[WorkerInfo]] = {}
        for member in self.members.values():
            if member.hello is not None:
                info, facts = member.hello.info, member.hello.facts
                if member.url in self.hosts.draining:
                    info = msgspec.structs.replace(info, draining=True)
                workers.setdefault(facts.names[0], []).append(info)
                if facts.names[0] not in self.models:
                    router = Router(self.settings.policy, max_entries=self.settings.max_digests)
                    self.models[facts.names[0]] = Model(router, facts)
                self.models[facts.names[0]].facts = facts
        for name in self.models:
            self._note_absence(name)
        for name in self.models.keys() - workers.keys():
            self.models[name].router.set_workers(())
            del self.models[name]
        self._names = {}
        for name, infos in workers.items():
            self.models[name].router.set_workers(infos)
            self._update_adapters(name)
            model = self.models[name]
            aliases = {alias for info in infos for alias in info.models} - model.lacking.keys()
            for alias in (*sorted(aliases), *model.adapters):
                self._names.setdefault(alias, name)
        self._names |= {name: name for name in self.models}
        self._name_offered()

    def _name_offered(self) -> None:
        self.hosts.facts |= {name: model.facts for name, model in self.models.items() if name in self.hosts.models}
        changed = {adapter: own for own in self.hosts.models for adapter in self.adapters.loaded(own)}
        self._names = {**self.hosts.names, **changed, **self._names, **{name: name for name in self.hosts.models}}

    def _update_adapters(self, name: str) -> None:
        model = self.models[name]
        served: dict[str, dict[str, AdapterFacts]] = {}
        every = set(self.adapters.loaded(name))
        for member in self.members.values():
            if member.hello is not None and member.hello.facts.names[0] == name:
                facts, outdated = member.hello.facts, self.adapters.outdated(member)
                every |= facts.adapters.keys()
                served[member.hello.info.id] = {one: it for one, it in facts.adapters.items() if one not in outdated}
        lacking = {one: frozenset(id for id, own in served.items() if one not in own) for one in every}
        model.lacking = {one: ids for one, ids in lacking.items() if ids}
        there = {one for own in served.values() for one in own} | self.adapters.loaded(name)
        model.adapters = {one: _agreed([own[one] for own in served.values() if one in own]) for one in sorted(there)}

    def _catch_up(self, model: str) -> None:
        self.adapters.catch_up(self.members_of(model))

    async def change_of_worker(self) -> None:
        self._changed.clear()
        await self._changed.wait()


def _agreed(facts: Sequence[AdapterFacts]) -> AdapterFacts:
    known = [one for one in facts if one.root is not None]
    return known[0] if known and all(one == known[0] for one in known) else AdapterFacts()
