"""Offline use from asyncio. The engine has its own process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, cast, overload

from vlmserve.cancellation import run_in_thread
from vlmserve.errors import ForkError, InvalidRequestError, UnavailableError, VLMServeError
from vlmserve.frontend.client import EngineClient
from vlmserve.frontend.engine_stream import EngineStream
from vlmserve.offline.calls import Call, Outcome
from vlmserve.offline.engine import AdapterNames
from vlmserve.offline.inputs import Conversation
from vlmserve.offline.model import OfflineModel
from vlmserve.offline.options import LLMOptions
from vlmserve.offline.requests import Generation, LoRARequest, OfflineRequest, Prepared, fitted
from vlmserve.settings.config import BUILT_IN_MODEL
from vlmserve.types import SamplingParams

if TYPE_CHECKING:
    from vlmserve.offline.calls import Adapters, ChatOptions, Model, OnError, Params
    from vlmserve.offline.inputs import Conversations, TextPrompts
    from vlmserve.offline.outputs import RequestOutput


class AsyncLLM(OfflineModel[AsyncGenerator[str, None]]):
    """A model in its own process, for one asyncio event loop, with the options of `LLM`.

    Use it as an asynchronous context manager, or call `close`. `start` or the first call loads the model. Concurrent
    calls share the engine's steps. Cancelling a task aborts its requests.

    `chat` and `generate` return a coroutine, or with ``stream=True`` an asynchronous iterator; `stream` returns an
    asynchronous iterator. If several items are wrong, the error names the first. Answers sampled without a seed depend
    on which images are ready first.

    Raises ConfigurationError for an unknown or impossible option. `start` and the first call raise ModelLoadError for
    an unusable checkpoint. Every call raises EngineDeadError after the engine process has died, ForkError in a forked
    process, and UnavailableError in another event loop.
    """

    def __init__(self, model: str = BUILT_IN_MODEL, **options: Unpack[LLMOptions]) -> None:
        super().__init__(model, options)
        self._threads = ThreadPoolExecutor(self._setup.media.threads, "prepare")
        self._ahead = _Ahead(self._setup.offline.prepare_ahead, self._setup.offline.prepare_ahead_memory)
        self._preparing = asyncio.Semaphore(self._setup.media.threads)
        self._ids = itertools.count()
        self._starting: asyncio.Future[EngineClient] | None = None
        self._process_id = os.getpid()
        self._adapters = AdapterNames()
        self._adapter_lock = asyncio.Lock()
        self._closed = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Load the model unless it is loaded. Raises ModelLoadError, ConfigurationError and EngineDeadError."""
        await self._client()

    async def close(self) -> None:
        """Stop the engine process. Unfinished requests raise UnavailableError."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._starting is not None:
            starting, self._starting = self._starting, None
            if not starting.done():
                starting.cancel()
            with contextlib.suppress(asyncio.CancelledError, VLMServeError):
                await (await starting).close()

    if TYPE_CHECKING:

        @overload  # type: ignore[override]
        def chat(
            self,
            messages: Conversations,
            sampling_params: Params = None,
            use_tqdm: bool = True,
            *,
            stream: Literal[False] = False,
            on_error: Literal["raise"] = "raise",
            **options: Unpack[ChatOptions],
        ) -> Coroutine[Any, Any, list[RequestOutput]]: ...

        @overload
        def chat(
            self,
            messages: Conversations,
            sampling_params: Params = None,
            use_tqdm: bool = True,
            *,
            stream: Literal[False] = False,
            on_error: Literal["raise"] = "raise",
            schema: type[Model],
            **options: Unpack[ChatOptions],
        ) -> Coroutine[Any, Any, list[Model]]: ...

        @overload
        def chat(
            self,
            messages: Conversations,
            sampling_params: Params = None,
            use_tqdm: bool = True,
            *,
            stream: Literal[False] = False,
            on_error: OnError = "raise",
            schema: Any = None,
            **options: Unpack[ChatOptions],
        ) -> Coroutine[Any, Any, list[Any]]: ...

        @overload
        def chat(
            self,
            messages: Conversations,
            sampling_params: Params = None,
            use_tqdm: bool = True,
            *,
            stream: Literal[True],
            on_error: OnError = "raise",
            schema: Any = None,
            **options: Unpack[ChatOptions],
        ) -> AsyncGenerator[Any, None]: ...

        def chat(self, *args: Any, **options: Any) -> Any: ...

        @overload  # type: ignore[override]
        def generate(
            self,
            prompts: TextPrompts,
            sampling_params: Params = None,
            use_tqdm: bool = True,
            *,
            stream: Literal[False] = False,
            on_error: OnError = "raise",
            lora_request: Adapters = None,
        ) -> Coroutine[Any, Any, list[Any]]: ...

        @overload
        def generate(
            self,
            prompts: TextPrompts,
            sampling_params: Params = None,
            use_tqdm: bool = True,
            *,
            stream: Literal[True],
            on_error: OnError = "raise",
            lora_request: Adapters = None,
        ) -> AsyncGenerator[Any, None]: ...

        def generate(self, *args: Any, **options: Any) -> Any: ...

    async def _texts(
        self, call: Call, messages: Conversation, params: SamplingParams, on_thought: Callable[[str], None]
    ) -> AsyncGenerator[str, None]:
        self._check()
        adapter = await self._load_adapter(cast(LoRARequest | None, call.lora_request))
        try:
            prepared = await run_in_thread(self._threads, partial(call.prepare_for, adapter, messages, params))
            request = await self._request(prepared, params)
        except InvalidRequestError as error:
            error.locate()
            raise
        [generation] = request.generations
        async with self._streams(request) as [stream]:
            async for _ in _taken(stream, generation):
                for text in generation.take_text(on_thought):
                    yield text
        if generation.error is not None:
            raise VLMServeError(generation.error)

    async def decide(self, *args: Any, **options: Any) -> Any:
        """See `OfflineModel.decide`. Makes prompts in a worker thread."""
        await self._client()
        return await (await run_in_thread(self._threads, partial(super().decide, *args, **options)))

    def _answer(self, call: Call, *, stream: bool, use_tqdm: bool) -> Any:
        params, several = call.params_of(self.default_sampling_params), call.adapters()
        adapters = itertools.repeat(cast(LoRARequest | None, call.lora_request)) if several is None else several
        results = self._results(call, zip(call.items, params, adapters, strict=False), stream=stream)
        return results if stream else _listed(results)

    async def _results(
        self, call: Call, wanted: Iterator[tuple[Any, SamplingParams, LoRARequest | None]], *, stream: bool
    ) -> AsyncGenerator[Any, None]:
        """Yield results in order. Closing aborts all."""
        await self._client()
        if call.before is not None:
            await self._answer(call.before, stream=False, use_tqdm=False)
        await run_in_thread(self._threads, call.check_all)
        running: deque[asyncio.Future[Outcome]] = deque()
        window = self._setup.window if stream else None
        numbered = enumerate(wanted)
        number = 0
        try:
            while True:
                most = None if window is None else window - len(running)
                for place, (item, params, adapter) in itertools.islice(numbered, most):
                    one = self._one(call, place, item, params, adapter)
                    running.append(asyncio.ensure_future(one))
                if not running:
                    return
                outcome = await running[0]
                running.popleft()
                for result in call.results_of(outcome, number):
                    yield result
                number += 1
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _one(
        self, call: Call, number: int, item: Any, params: SamplingParams, adapter: LoRARequest | None
    ) -> Outcome:
        try:
            async with self._ahead.place() as place:
                name = await self._load_adapter(adapter)
                async with self._preparing:
                    await self._client()
                    prepared = await run_in_thread(self._threads, partial(call.prepare_for, name, item, params))
                    await place.fill(prepared.num_bytes)
                request = await self._request(prepared, params)
                del prepared
                async with self._streams(request) as streams:
                    pairs = zip(streams, request.generations, strict=True)
                    await asyncio.gather(*(_finish(*pair, place) for pair in pairs))
                return request.result()
        except Exception as error:
            call.name(error, number)
            if not isinstance(error, InvalidRequestError) or call.on_error == "raise":
                raise
            return error

    async def _client(self) -> EngineClient:
        self._check()
        if self._starting is None:
            self._process_id = os.getpid()
            self._starting = asyncio.ensure_future(self._start())
        try:
            return await asyncio.shield(self._starting)
        except VLMServeError:
            self._starting = None  # let another call retry
            raise

    def _check(self) -> None:
        if self._closed:
            raise UnavailableError("the AsyncLLM is closed")
        if self._starting is None:
            return
        if self._process_id != os.getpid():
            raise ForkError(
                f"process {self._process_id} started this AsyncLLM and cannot share it with its fork {os.getpid()}; "
                "create an AsyncLLM in each process"
            )
        if self._starting.get_loop() is not asyncio.get_running_loop():
            raise UnavailableError("this AsyncLLM belongs to another event loop; create an AsyncLLM in each event loop")

    async def _start(self) -> EngineClient:
        client = await EngineClient.start(self.config, self._setup.folder)
        try:
            self.preparer.fit(client.info)
        except BaseException:
            await client.close()
            raise
        return client

    async def _request(self, prepared: Prepared, params: SamplingParams) -> OfflineRequest:
        prepared = fitted(prepared, params, (await self._client()).info)
        return OfflineRequest(f"async-{next(self._ids)}", prepared, params, self.preparer)

    @contextlib.asynccontextmanager
    async def _streams(self, request: OfflineRequest) -> AsyncGenerator[list[EngineStream], None]:
        """Outputs of all answers. Leaving the block aborts unfinished ones."""
        streams = await (await self._client()).submit_together(request.requests)
        try:
            yield streams
        finally:
            for stream in streams:
                stream.close()

    async def _load_adapter(self, wanted: LoRARequest | None) -> str:
        if wanted is None:
            return ""
        client = await self._client()
        async with self._adapter_lock:
            name, is_served = self._adapters.find(
                wanted, {one.name: one.path for one in client.calls.adapters.values()}
            )
            if not is_served:
                await client.calls.load_adapter(name, wanted.lora_path)
            self._adapters.loaded(wanted, name)
        return name


class _Ahead:
    """Bounds requests without a token by number and bytes. Prepares a larger one alone."""

    def __init__(self, most: int, max_bytes: int) -> None:
        self._places = asyncio.Semaphore(most)
        self._max_bytes = max_bytes
        self._bytes = 0
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncGenerator[_Place, None]:
        await self._places.acquire()
        place = _Place(self)
        try:
            yield place
        finally:
            await place.leave()

    async def take(self, num_bytes: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._bytes or self._bytes + num_bytes <= self._max_bytes)
            self._bytes += num_bytes

    async def give(self, num_bytes: int) -> None:
        self._bytes -= num_bytes
        self._places.release()
        async with self._changed:
            self._changed.notify_all()


class _Place:
    def __init__(self, ahead: _Ahead) -> None:
        self._ahead, self._bytes, self._left = ahead, 0, False

    async def fill(self, num_bytes: int) -> None:
        await self._ahead.take(num_bytes)
        self._bytes = num_bytes

    async def leave(self) -> None:
        if not self._left:
            self._left = True
            await self._ahead.give(self._bytes)


async def _taken(stream: EngineStream, generation: Generation) -> AsyncIterator[None]:
    async for output in stream:
        generation.take(output)
        yield
        if generation.finish_reason is not None:
            return


async def _finish(stream: EngineStream, generation: Generation, place: _Place) -> None:
    async for _ in _taken(stream, generation):
        await place.leave()


async def _listed(results: AsyncGenerator[Any, None]) -> list[Any]:
    async with contextlib.aclosing(results):
        return [result async for result in results]
