"""State that the routes share."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from vlmserve.errors import (
    ConfigurationError,
    EngineDeadError,
    OverloadedError,
    UnavailableError,
    UnknownModelError,
    VLMServeError,
)
from vlmserve.frontend.client import EngineClient
from vlmserve.models.names import repository_of
from vlmserve.server.accounts import KeyRing
from vlmserve.server.adapters import Adapters
from vlmserve.server.body import BodyMemory
from vlmserve.server.cache_diagnosis import CacheLog
from vlmserve.server.collectors import RunningEngine
from vlmserve.server.demand import Demand
from vlmserve.server.metrics import ServerMetrics
from vlmserve.server.preparation import Preparation
from vlmserve.server.schema.base import BodyLimits
from vlmserve.server.schema.cards import Abilities, Input
from vlmserve.server.schema.ollama import LATEST
from vlmserve.settings.config import EngineConfig, MediaConfig, ServerConfig
from vlmserve.storage.store import open_store
from vlmserve.types import AdapterInfo, EngineStats, ModelInfo, SamplingParams

if TYPE_CHECKING:
    from vlmserve.frontend.requests import RequestPreparer
    from vlmserve.server.tracing import Tracing

Phase = Literal["asleep", "loading", "serving", "restarting", "closing"]
Result = TypeVar("Result")
_SHARE_OF_AN_ANSWER = 0.2
"""Default maximum answer, as a fraction of the context."""
_MOST_SHOWN = 5
"""Maximum adapters that an error lists."""


def open_tracing(endpoint: str | None) -> Tracing | None:
    """None if tracing is off. Raises ConfigurationError if the extra is not installed."""
    if endpoint is None:
        return None
    try:
        from vlmserve.server.tracing import Tracing
    except ImportError:
        raise ConfigurationError(
            "--otlp-traces-endpoint needs OpenTelemetry's packages; run: pip install 'vlmserve[otel]'"
        ) from None
    return Tracing(endpoint)


_TOLD_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling parameters whose defaults are shown to clients."""


class Service:
    """Loading until `open`. Rejects new requests after `drain`.

    Raises ConfigurationError for unreadable API keys, or an invalid address for traces.
    """

    def __init__(self, engine: EngineConfig, media: MediaConfig, server: ServerConfig) -> None:
        self.config = server
        self.media = media
        self.adapters = Adapters(engine, server)
        self.names = ServedNames(engine, server, self.adapters, lambda: self._client)
        self.model_name = self.names.own[0]
        self.created = int(time.time())
        self.defaults = SamplingParams()
        self.keys = KeyRing.of(server)
        """None: requests need no key."""
        self.tracing = open_tracing(server.otlp_traces_endpoint)
        """None: tracing is off."""
        self.store = open_store(server)
        self.bodies = BodyMemory(server.body_memory)
        self.max_logprobs = engine.max_logprobs
        self.max_body_bytes = min(server.max_body_bytes, server.body_memory)
        self.body_limits = BodyLimits(server.max_body_values, server.max_messages)
        self._max_answers = engine.max_waiting + engine.max_num_seqs
        self._num_answers = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = False
        self.demand = Demand(is_lazy=engine.load == "lazy")
        self.batch_news = asyncio.Event()
        """See `BatchHost`."""
        self.serves_several = False
        self.background_preparation = asyncio.Semaphore(max(1, media.threads // 2))
        """Held while a batch's prompt is prepared, so that other requests find free threads."""
        self.load_progress = ""
        """The engine's progress while it loads."""
        self.on_load_progress: Callable[[str], None] = lambda text: None
        self._client: EngineClient | None = None
        self.back_at: float | None = None
        """When a dead engine will probably be back, by `time.monotonic`; None: no restart is planned."""
        self.preparation = Preparation(media)
        self.cache_log = CacheLog(engine.block_size)
        self.metrics = ServerMetrics(
            self.model_name,
            engine_stats=self.engine_stats,
            image_cache_stats=self.preparation.image_cache_stats,
            engine=self._running_engine,
            cache_config=_cache_config(engine),
        )

    def open(self, client: EngineClient, preparer: RequestPreparer, defaults: SamplingParams | None = None) -> None:
        """preparer: knows the engine's limits. defaults: sampling parameters of requests."""
        self.replace(client)
        self.preparation.open(preparer)
        self.defaults = defaults or self.defaults
        self.batch_news.set()

    def replace(self, client: EngineClient | None) -> None:
        """Continue with another engine. None: unload the model until a request needs it."""
        self._client = client
        if client is None:
            self.demand.unloaded()
            return
        client.on_step = self.metrics.count_step
        if self.preparation.is_open:
            self.adapters.restore(client)
        self.demand.loaded()

    @property
    def awake(self) -> bool:
        return not self.demand.loads_model or self._client is not None or self._closing

    async def wake(self) -> None:
        """Load the model, or wait for its load. Raises UnavailableError if that fails."""
        if not self.awake:
            await self.demand.load()
            if not self.awake:
                raise UnavailableError(f"{self.model_name} could not be loaded: {self.demand.failure}")

    async def drain(self, grace: float) -> bool:
        """Reject new requests. Returns whether running ones ended within `grace` seconds."""
        self._closing = True
        self.demand.loaded()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self._idle.wait()
        return self._idle.is_set()

    def close(self) -> None:
        self.preparation.close()
        if self.store is not None:
            self.store.close()
        if self.tracing is not None:
            self.tracing.close()

    @property
    def num_answers(self) -> int:
        """Running answers, counted from the arrival of their requests."""
        return self._num_answers

    @property
    def client(self) -> EngineClient:
        """The engine client, ready for requests. Raises UnavailableError or EngineDeadError."""
        problem = self.problem()
        if problem is not None:
            raise problem
        assert self._client is not None
        return self._client

    @property
    def info(self) -> ModelInfo | None:
        """A new object after every engine start; None while the model loads."""
        return None if self._client is None else self._client.info

    @property
    def abilities(self) -> Abilities | None:
        """The model's abilities; None while it loads."""
        info = self.info
        if info is None or not self.preparation.is_open:
            return None
        preparer = self.preparer
        inputs: list[Input] = ["text"]
        inputs += ["image", "file"] if preparer.media.supports_images else []
        inputs += ["video"] if preparer.media.supports_videos else []
        longest = min(info.max_model_len, self.config.max_output_tokens or info.max_model_len)
        return Abilities(
            info.max_model_len,
            info.max_prompt_len,
            longest,
            self.max_logprobs,
            tuple(inputs),
            tools=preparer.takes_tools,
            reasons=preparer.answers.reasoning is not None,
            max_request_bytes=self.config.max_body_bytes,
            useful_image_pixels=preparer.media.useful_pixels(),
            defaults={name: getattr(self.defaults, name) for name in _TOLD_DEFAULTS},
            num_parameters=info.num_parameters,
            weight_bytes=info.weight_bytes,
        )

    def engine_stats(self) -> EngineStats | None:
        """None without a living engine. Unreported requests count as waiting."""
        if self._client is None or not self._client.alive:
            return None
        stats = self._client.stats
        waiting = max(stats.num_waiting, self._client.num_unfinished - stats.num_running)
        return msgspec.structs.replace(stats, num_waiting=waiting)

    def _running_engine(self) -> RunningEngine | None:
        client = self._client
        return (
            None
            if client is None
            else RunningEngine(client.process.pid, client.info, client.load_seconds, client.heartbeat.silence)
        )

    @property
    def phase(self) -> Phase:
        if self._closing:
            return "closing"
        if self._client is not None:
            return "serving" if self._client.alive or self.back_at is None else "restarting"
        return "loading" if self.demand.wanted.is_set() else "asleep"

    def check_serving(self) -> None:
        """Raise the errors of `client`, except while the model waits for a request."""
        problem = self.problem()
        if problem is not None and not (self.demand.loads_model and self.phase in ("asleep", "loading")):
            raise problem

    def problem(self) -> VLMServeError | None:
        if self._closing:
            return UnavailableError("The server is shutting down")
        if self._client is None:
            progress = f" ({self.load_progress})" if self.load_progress else ""
            return UnavailableError(f"The server is still loading {self.model_name}{progress}; try again soon")
        if self.phase == "restarting":
            message = f"{self._client.death}; another engine is being started, try again soon"
            return UnavailableError(message, retry_after=(self.back_at or 0.0) - time.monotonic())
        if not self._client.alive:
            return EngineDeadError(self._client.death or "The engine is closed")
        return None

    def silence(self) -> UnavailableError | None:
        """The engine has been silent for too long."""
        if self._client is None or self._client.heartbeat.silence < self.config.engine_silence:
            return None
        return UnavailableError(f"The engine has not responded for {self._client.heartbeat.silence:.0f} s")

    @contextlib.contextmanager
    def admit(self, num_answers: int) -> Iterator[None]:
        """Count a request's answers. Raises OverloadedError beyond the limit."""
        if self._num_answers + num_answers > self._max_answers:
            counts = f"{self._num_answers} answers run or wait, this request wants {num_answers}"
            raise OverloadedError(f"{counts}, and {self._max_answers} are allowed; try again later")
        self._num_answers += num_answers
        self._idle.clear()
        try:
            yield
        finally:
            self._num_answers -= num_answers
            if self._num_answers == 0:
                self._idle.set()

    @property
    def preparer(self) -> RequestPreparer:
        """Makes prompts. Raises UnavailableError while the model loads."""
        return self.preparation.preparer

    @property
    def default_limit(self) -> int:
        own = self.config.default_max_tokens
        return own or max(1, int(self.client.info.max_model_len * _SHARE_OF_AN_ANSWER))


def _cache_config(engine: EngineConfig) -> dict[str, Any]:
    return {
        "block_size": engine.block_size,
        "cache_dtype": engine.kv_cache_dtype,
        "enable_prefix_caching": engine.enable_prefix_caching,
    }


class ServedNames:
    def __init__(
        self, engine: EngineConfig, server: ServerConfig, adapters: Adapters, client: Callable[[], EngineClient | None]
    ) -> None:
        is_path = engine.model.startswith(("/", "./", "../", "~"))
        own_name = (engine.model.rstrip("/").rsplit("/", 1)[-1] if is_path else "") or engine.model
        self.own = tuple(dict.fromkeys(server.served_model_name)) or (own_name,)
        """Names of the model itself; answers have the first one."""
        self._aliases = {*self.own, engine.model, repository_of(engine.model) or engine.model}
        self._adapters, self._client = adapters, client

    @property
    def all(self) -> tuple[str, ...]:
        adapters = (name for name, _ in self.adapter_infos())
        return tuple(dict.fromkeys((*self.own, *sorted(self._aliases), *adapters)))

    def check(self, name: str | None) -> None:
        if not self.is_own(name) and not self._adapters.knows(self._client(), self.untagged(str(name))):
            adapters = [adapter for adapter, _ in itertools.islice(self.adapter_infos(), _MOST_SHOWN)]
            known = ", ".join(map(repr, [*self.own, *adapters]))
            raise UnknownModelError(f"There is no model {name!r:.100} here, only {known}", param="model")

    def is_own(self, name: str | None) -> bool:
        """True for the model itself, False for an adapter."""
        return name is None or not self._aliases.isdisjoint((name, name.removesuffix(LATEST), f"{name}{LATEST}"))

    def adapter_infos(self) -> Iterator[tuple[str, AdapterInfo | None]]:
        return self._adapters.infos(self._client())

    async def adapter(self, client: EngineClient, name: str | None) -> str:
        """Have the engine serve the adapter that a request names; "" for the model itself.

        Raises UnknownModelError or AdapterError.
        """
        if name is None or self.is_own(name):
            return ""
        own = self.untagged(name)
        await self._adapters.resolve(client, own)
        return own

    def untagged(self, name: str) -> str:
        """Remove Ollama's default tag, unless an adapter's name has it."""
        return name if self._adapters.knows(self._client(), name) else name.removesuffix(LATEST)
