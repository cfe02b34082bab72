"""What the routes share: the engine client, the request preparer, the names, the limits, and the server's phase."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack

import msgspec

from vlmserve.cancellation import run_in_thread
from vlmserve.config import EngineConfig, MediaConfig, ServerConfig
from vlmserve.cores import usable_cores
from vlmserve.errors import (
    ConfigurationError,
    EngineDeadError,
    OverloadedError,
    UnavailableError,
    UnknownModelError,
    VLMServeError,
)
from vlmserve.frontend.client import EngineClient
from vlmserve.frontend.conversations import ConversationOptions
from vlmserve.frontend.tools import ToolUse
from vlmserve.media.cache import ImageCacheStats
from vlmserve.prompt.template_limits import SlowRenderingError, only_quick
from vlmserve.sampling.trials import SlowGrammarError
from vlmserve.server.accounts import KeyRing
from vlmserve.server.adapters import Adapters
from vlmserve.server.body import BodyMemory
from vlmserve.server.collectors import RunningEngine
from vlmserve.server.errors import RefusedError
from vlmserve.server.fair_queue import FairQueue
from vlmserve.server.idle_memory import IdleMemory
from vlmserve.server.metrics import ServerMetrics
from vlmserve.server.schema.base import BodyLimits
from vlmserve.server.schema.cards import Abilities, Input
from vlmserve.storage.store import open_store
from vlmserve.types import AdapterInfo, EngineStats, Grammar, ModelInfo, Prompt, SamplingParams

if TYPE_CHECKING:
    from vlmserve.frontend.requests import RequestPreparer
    from vlmserve.server.tracing import Tracing

Phase = Literal["asleep", "loading", "serving", "restarting", "closing"]
Result = TypeVar("Result")
_GRAMMAR_PROCESSES = max(2, min(4, usable_cores()))
_SLOW_GRAMMAR_PROCESSES = 1
_TEXT_THREADS = 3
_SLOW_TEXT_THREADS = 2
"""For prompts whose chat template takes long."""
_SHORT_TEXT = 2000
"""Characters that are a prompt sooner than another thread would have begun."""
_MOST_SHOWN = 5
"""Adapters that an error names."""
_SHARE_OF_AN_ANSWER = 0.2
"""Of the context, if a request sets no limit."""


def open_tracing(endpoint: str | None) -> Tracing | None:
    """Makes traces; None if tracing is off. Raises ConfigurationError if the extra is not installed."""
    if endpoint is None:
        return None
    try:
        from vlmserve.server.tracing import Tracing
    except ImportError:
        raise ConfigurationError(
            "--otlp-traces-endpoint needs OpenTelemetry's packages; run: pip install 'vlmserve[otel]'"
        ) from None
    return Tracing(endpoint)


class Service:
    """A server's state. It is loading until `open` is called, and refuses new requests from `drain` on.

    Raises ConfigurationError for API keys that cannot be read, and for traces that cannot be sent.
    """

    def __init__(self, engine: EngineConfig, media: MediaConfig, server: ServerConfig) -> None:
        self.config = server
        self.media = media
        is_path = engine.model.startswith(("/", "./", "../", "~"))
        own_name = (engine.model.rstrip("/").rsplit("/", 1)[-1] if is_path else "") or engine.model
        self.model_names = tuple(dict.fromkeys(server.served_model_name)) or (own_name,)
        self.model_name = self.model_names[0]
        self._aliases = {*self.model_names, engine.model}
        self.adapters = Adapters(engine, server)
        self.created = int(time.time())
        self.defaults = SamplingParams()
        self.keys = KeyRing.of(server)
        """Who may ask; None: everybody."""
        self.tracing = open_tracing(server.otlp_traces_endpoint)
        """Makes traces of requests; None: tracing is off."""
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
        self.wanted = asyncio.Event()
        """Set when the model is to be loaded."""
        self.batch_news = asyncio.Event()
        """Set when a batch was made, was cancelled or has ended, and when the model is there."""
        self.background_preparation = asyncio.Semaphore(max(1, media.threads // 2))
        """Held while a prompt is prepared that nobody waits for: others find free threads."""
        self._lazy = engine.load == "lazy"
        if not self._lazy:
            self.wanted.set()
        self._opened = asyncio.Event()
        self._client: EngineClient | None = None
        self.back_at: float | None = None
        """When a dead engine is expected back, on the clock of `time.monotonic`; None: it is not restarted."""
        self._preparer: RequestPreparer | None = None
        self.metrics = ServerMetrics(
            self.model_name,
            engine_stats=self.engine_stats,
            image_cache_stats=self.image_cache_stats,
            engine=self._running_engine,
            cache_config=_cache_config(engine),
        )
        # A slow image must not hold up text, nor a slow host the images that are here already.
        self._body_workers = ThreadPoolExecutor(1, "parse-bodies")
        self._text_workers = ThreadPoolExecutor(_TEXT_THREADS, "prepare-text")
        self._text_queue = FairQueue(_TEXT_THREADS, _TEXT_THREADS - 1)
        self._slow_text_workers = ThreadPoolExecutor(_SLOW_TEXT_THREADS, "prepare-slow-text")
        self._slow_text_queue = FairQueue(_SLOW_TEXT_THREADS, 1)
        # Each of these threads waits for a process that compiles.
        self._grammar_workers = ThreadPoolExecutor(_GRAMMAR_PROCESSES, "check-grammars")
        self._grammar_queue = FairQueue(_GRAMMAR_PROCESSES, _GRAMMAR_PROCESSES - 1)
        self._slow_grammar_workers = ThreadPoolExecutor(_SLOW_GRAMMAR_PROCESSES, "check-slow-grammars")
        self._slow_grammar_queue = FairQueue(_SLOW_GRAMMAR_PROCESSES, _SLOW_GRAMMAR_PROCESSES)
        image_requests = _IMAGE_REQUESTS * media.threads
        self._image_workers = ThreadPoolExecutor(image_requests, "prepare-images")
        self._fetch_workers = ThreadPoolExecutor(media.media_fetches, "prepare-remote")
        self._file_workers = ThreadPoolExecutor(media.media_processes, "prepare-files")
        self._queues = {
            self._image_workers: FairQueue(image_requests, image_requests * 3 // 4),
            self._fetch_workers: FairQueue(media.media_fetches, media.client_media_fetches),
            self._file_workers: FairQueue(media.media_processes, media.client_media_processes),
        }
        """Queues of threads in which one client could leave none to others."""
        self._memory = IdleMemory(self._text_workers, lambda: any(queue.running for queue in self._queues.values()))

    def open(self, client: EngineClient, preparer: RequestPreparer, defaults: SamplingParams | None = None) -> None:
        """Begin to serve. preparer: knows the engine's limits. defaults: what requests that say nothing about sampling
        get."""
        self.replace(client)
        self._preparer = preparer
        self.defaults = defaults or self.defaults
        self._opened.set()
        self.batch_news.set()

    def replace(self, client: EngineClient) -> None:
        """Go on with another engine after the one from before has died."""
        replaced, self._client = self._client is not None, client
        client.on_step = self.metrics.count_step
        if replaced:
            self.adapters.restore(client)

    @property
    def awake(self) -> bool:
        """Whether there is nothing to wait for."""
        return not self._lazy or self._client is not None or self._closing

    async def wake(self) -> None:
        """See to it that a model that is loaded on demand is there; who comes while it is loading waits for it."""
        if not self.awake:
            self.wanted.set()
            await self._opened.wait()

    async def drain(self, grace: float) -> bool:
        """Refuse new requests from now on, wait for the running ones; whether they ended within `grace` seconds."""
        self._closing = True
        self._opened.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace)
        return self._idle.is_set()

    def close(self) -> None:
        """Let go of the worker threads, the traces and the history. The client belongs to the caller."""
        self._memory.close()
        for pool in (
            self._body_workers,
            self._text_workers,
            self._slow_text_workers,
            self._grammar_workers,
            self._slow_grammar_workers,
            self._image_workers,
            self._fetch_workers,
            self._file_workers,
        ):
            pool.shutdown(wait=False, cancel_futures=True)
        if self.store is not None:
            self.store.close()
        if self.tracing is not None:
            self.tracing.close()

    @property
    def num_answers(self) -> int:
        """Running answers, counted from the arrival of their request."""
        return self._num_answers

    @property
    def client(self) -> EngineClient:
        """The engine client, to which requests may be sent now. Raises UnavailableError or EngineDeadError."""
        problem = self.problem()
        if problem is not None:
            raise problem
        assert self._client is not None
        return self._client

    @property
    def engine_identity(self) -> object:
        """Another object for each engine that was started; None until there is one."""
        return self._client

    @property
    def known_names(self) -> tuple[str, ...]:
        """All names under which requests reach the model or its adapters, its own one first."""
        adapters = (name for name, _ in self.adapter_infos())
        return tuple(dict.fromkeys((*self.model_names, *sorted(self._aliases), *adapters)))

    @property
    def info(self) -> ModelInfo | None:
        """The model; None while it is loading."""
        return None if self._client is None else self._client.info

    @property
    def abilities(self) -> Abilities | None:
        """What the model can do; None while it loads."""
        info, preparer = self.info, self._preparer
        if info is None or preparer is None:
            return None
        inputs: list[Input] = ["text"]
        inputs += ["image", "file"] if preparer.supports_images else []
        inputs += ["video"] if preparer.supports_videos else []
        longest = min(info.max_model_len, self.config.max_output_tokens or info.max_model_len)
        return Abilities(
            info.max_model_len,
            info.max_prompt_len,
            longest,
            self.max_logprobs,
            tuple(inputs),
            tools=preparer.takes_tools,
            reasons=preparer.answers.reasoning is not None,
        )

    @property
    def supports_videos(self) -> bool:
        """Whether the model takes videos; also while it is loading."""
        return self._preparer is None or self._preparer.supports_videos

    def engine_stats(self) -> EngineStats | None:
        """The engine's latest stats; None without a living engine. Requests that it has yet to report on wait."""
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

    def image_cache_stats(self) -> ImageCacheStats | None:
        """The stats of the image cache; None while the model is loading."""
        return None if self._preparer is None else self._preparer.image_cache.stats()

    @property
    def phase(self) -> Phase:
        if self._closing:
            return "closing"
        if self._client is not None:
            return "serving" if self._client.alive or self.back_at is None else "restarting"
        return "loading" if self.wanted.is_set() else "asleep"

    def check_serving(self) -> None:
        """Raises what `client` raises, unless the model only waits for a request to be loaded."""
        problem = self.problem()
        if problem is not None and not (self._lazy and self.phase in ("asleep", "loading")):
            raise problem

    def problem(self) -> VLMServeError | None:
        """Why no request can be answered now."""
        if self._closing:
            return UnavailableError("The server is shutting down")
        if self._client is None:
            return UnavailableError(f"The server is still loading {self.model_name}; try again soon")
        if self.phase == "restarting":
            message = f"{self._client.death}; another engine is being started, try again soon"
            return UnavailableError(message, retry_after=(self.back_at or 0.0) - time.monotonic())
        if not self._client.alive:
            return EngineDeadError(self._client.death or "The engine is closed")
        return None

    def silence(self) -> UnavailableError | None:
        """Why requests should go elsewhere although the engine runs: nothing has been heard of it for too long."""
        if self._client is None or self._client.heartbeat.silence < self.config.engine_silence:
            return None
        return UnavailableError(f"The engine has not responded for {self._client.heartbeat.silence:.0f} s")

    def check_model(self, name: str | None) -> None:
        """Raises UnknownModelError for a name that is not served here."""
        if name is not None and name not in self._aliases and not self.adapters.knows(self._client, name):
            adapters = [adapter for adapter, _ in itertools.islice(self.adapter_infos(), _MOST_SHOWN)]
            known = ", ".join(map(repr, [*self.model_names, *adapters]))
            raise UnknownModelError(f"There is no model {name!r:.100} here, only {known}", param="model")

    def is_own_name(self, name: str | None) -> bool:
        """Whether a request's model is the model itself, not an adapter."""
        return name is None or name in self._aliases

    def adapter_infos(self) -> Iterator[tuple[str, AdapterInfo | None]]:
        """The names of all adapters, and what the engine says of those that it serves."""
        return self.adapters.infos(self._client)

    async def adapter(self, client: EngineClient, name: str | None) -> str:
        """The adapter that a request's model names, which the engine serves from now on; "" for the model itself.

        Raises UnknownModelError and AdapterError.
        """
        if name is None or name in self._aliases:
            return ""
        await self.adapters.resolve(client, name)
        return name

    @contextlib.contextmanager
    def admit(self, num_answers: int) -> Iterator[None]:
        """Count a request's answers while it runs. Raises OverloadedError if there are too many."""
        if self._num_answers + num_answers > self._max_answers:
            raise OverloadedError(f"{self._num_answers} answers are running already; try again later")
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
        """What makes prompts, once the model is loaded."""
        assert self._preparer is not None
        return self._preparer

    @property
    def default_limit(self) -> int:
        """The longest answer to a request that sets no limit, in tokens."""
        own = self.config.default_max_tokens
        return own or max(1, int(self.client.info.max_model_len * _SHARE_OF_AN_ANSWER))

    async def parse(self, parse: Callable[[], Result]) -> Result:
        """What `parse` makes of a large body, in a worker thread. Raises what it does."""
        return await run_in_thread(self._body_workers, parse)

    async def prepare_text(self, make: Callable[[RequestPreparer], Result], size: int) -> Result:
        """What `make` makes of text with `size` characters, in a worker thread if that takes long. Raises what it
        does."""
        if size <= _SHORT_TEXT:
            return make(self.preparer)
        return await self._text_queue.run(self._text_workers, functools.partial(make, self.preparer))

    async def check_grammar(self, grammar: Grammar, tools: ToolUse | None = None) -> list[str]:
        """Find out whether the engine may compile a grammar. Returns and raises what the preparer does.

        Only slow grammars wait for slow grammars, and clients take turns.
        """
        check = functools.partial(self.preparer.answers.check_grammar, grammar, tools)
        if self.preparer.answers.knows_grammar(grammar):
            return check()
        try:
            return await self._grammar_queue.run(self._grammar_workers, functools.partial(check, quick=True))
        except SlowGrammarError:
            return await self._slow_grammar_queue.run(self._slow_grammar_workers, check)

    async def look_at_file(self, work: Callable[[], Result]) -> Result:
        """Run `work`, which may take as long as to open a file, in a thread that prepares images."""
        return await self._run_media(self._image_workers, work)

    async def _run_media(self, workers: ThreadPoolExecutor, work: Callable[[], Result]) -> Result:
        try:
            return await self._queues[workers].run(workers, work)
        finally:
            self._memory.worked()

    async def prepare(self, messages: list[dict[str, Any]], **options: Unpack[ConversationOptions]) -> Prompt:
        """The prompt of a conversation, made in a worker thread. Takes and raises what the preparer does.

        Only slow renderings wait for slow renderings, and clients take turns.
        """
        shown = [
            part
            for message in messages
            if isinstance(message.get("content"), list)
            for part in message["content"]
            if part["type"] != "text"
        ]
        conversation = self.preparer.conversation(messages, **options)
        workers = self._workers(shown)
        has_tools = options.get("tools") is not None

        def quickly() -> Prompt:
            with only_quick():
                return conversation.prompt()

        is_short = not (shown or has_tools) and sum(map(_num_characters, messages)) <= _SHORT_TEXT
        try:
            try:
                return await self._prepare_in(None if is_short else workers, quickly)
            except SlowRenderingError:
                await self._slow_text_queue.run(self._slow_text_workers, conversation.render)
                return await self._prepare_in(workers, conversation.prompt)
        except MemoryError:
            raise RefusedError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "There is not enough memory for these images", "out_of_memory"
            ) from None

    async def _prepare_in(self, workers: ThreadPoolExecutor | None, prepare: Callable[[], Prompt]) -> Prompt:
        """Prepare in a thread, or here without `workers`."""
        if workers is None:
            return prepare()
        if workers in self._queues:
            return await self._run_media(workers, prepare)
        return await self._text_queue.run(workers, prepare)

    def _workers(self, shown: Sequence[Mapping[str, Any]]) -> ThreadPoolExecutor:
        """The threads that prepare a conversation with these parts: what takes long keeps nobody waiting that does
        not."""
        if any(part["type"] in _FILES for part in shown):
            return self._file_workers
        if any(not url.startswith("data:") for part in shown for url in _urls(part)):
            return self._fetch_workers
        return self._image_workers if shown else self._text_workers


_IMAGE_REQUESTS = 16
"""Requests with images that are prepared at once, for each thread that decodes; most wait for such a thread."""
_FILES = frozenset({"file", "video_url"})
"""Types of parts that are decoded in processes of their own."""


def _cache_config(engine: EngineConfig) -> dict[str, Any]:
    return {
        "block_size": engine.block_size,
        "cache_dtype": engine.kv_cache_dtype,
        "enable_prefix_caching": engine.enable_prefix_caching,
    }


def _num_characters(message: Mapping[str, Any]) -> int:
    """Of a message without images."""
    content = message["content"]
    said = len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)
    return said + len(str(message.get("tool_calls", ""))) + len(message.get("reasoning_content", ""))


def _urls(part: Mapping[str, Any]) -> Sequence[str]:
    """Where a part's image, or the video or its frames, come from."""
    kind = part["type"]
    return part["video"] if kind == "video" else (part[kind]["url"],)
