"""Threads that prepare requests. Clients share them fairly, and slow work delays only slow work."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import msgspec

from vlmserve.cancellation import run_in_thread
from vlmserve.cores import usable_cores
from vlmserve.errors import InvalidRequestError
from vlmserve.frontend.conversations import ConversationOptions
from vlmserve.frontend.media_preparer import KnownMedia
from vlmserve.frontend.tools import ToolUse
from vlmserve.media.cache import ImageCacheStats
from vlmserve.media.fetch import fetch_file
from vlmserve.memory import return_free_memory
from vlmserve.prompt.template_limits import SlowRenderingError, only_quick
from vlmserve.sampling.trials import SlowGrammarError
from vlmserve.server.errors import RefusedError
from vlmserve.server.fair_queue import FairQueue, FairThreads
from vlmserve.settings.config import MediaConfig
from vlmserve.types import Grammar, Prompt

if TYPE_CHECKING:
    from vlmserve.frontend.requests import Conversation, RequestPreparer

Result = TypeVar("Result")
_GRAMMAR_PROCESSES = max(2, min(4, usable_cores()))
_SLOW_GRAMMAR_PROCESSES = 1
_TEXT_THREADS = 3
_SLOW_TEXT_THREADS = 2
"""Threads for prompts with slow chat templates."""
_SHORT_TEXT = 2000
"""Characters of a prompt that is made faster than another thread starts."""
_ALIKE = 64
"""Conversations that a thread prepares before other clients get their turn."""
_IMAGE_REQUESTS = 16
"""Concurrent requests with images per decoding thread; most of them wait for such a thread."""
_FILES = frozenset({"file", "video_url"})
"""Types of parts that separate processes decode."""
_PAUSE = 1.0
"""Seconds after work ends to check for new work."""


class Preparation:
    def __init__(self, media: MediaConfig) -> None:
        self._preparer: RequestPreparer | None = None
        # slow images must not delay text, and slow hosts must not delay images that have arrived
        self._body_workers = ThreadPoolExecutor(1, "parse-bodies")
        self._texts = FairThreads("prepare-text", _TEXT_THREADS, _TEXT_THREADS - 1)
        self._slow_texts = FairThreads("prepare-slow-text", _SLOW_TEXT_THREADS, 1)
        # Each thread waits for a compiling process.
        self._grammars = FairThreads("check-grammars", _GRAMMAR_PROCESSES, _GRAMMAR_PROCESSES - 1)
        self._slow_grammars = FairThreads("check-slow-grammars", _SLOW_GRAMMAR_PROCESSES, _SLOW_GRAMMAR_PROCESSES)
        image_requests = _IMAGE_REQUESTS * media.threads
        self._images = FairThreads("prepare-images", image_requests, image_requests * 3 // 4)
        self._fetches = FairThreads("prepare-remote", media.media_fetches, media.client_media_fetches)
        self._files = FairThreads("prepare-files", media.media_processes, media.client_media_processes)
        self._media = (self._images, self._fetches, self._files)
        self._slow_files = FairQueue(media.media_processes, media.client_media_processes)
        """Conversations with documents or videos and a slow chat template."""
        self.memory = IdleMemory(self._texts.executor, lambda: any(one.running for one in self._media))

    def open(self, preparer: RequestPreparer) -> None:
        self._preparer = preparer

    @property
    def is_open(self) -> bool:
        return self._preparer is not None

    @property
    def preparer(self) -> RequestPreparer:
        assert self._preparer is not None
        return self._preparer

    @property
    def supports_videos(self) -> bool:
        """True if the model takes videos, and while it loads."""
        return self._preparer is None or self._preparer.media.supports_videos

    def image_cache_stats(self) -> ImageCacheStats | None:
        """None while the model loads."""
        return None if self._preparer is None else self._preparer.media.image_cache.stats()

    def close(self) -> None:
        self.memory.close()
        shared = (self._texts, self._slow_texts, self._grammars, self._slow_grammars, *self._media)
        for pool in (self._body_workers, *(one.executor for one in shared)):
            pool.shutdown(wait=False, cancel_futures=True)

    async def parse(self, parse: Callable[[], Result]) -> Result:
        return await run_in_thread(self._body_workers, parse)

    async def text(self, make: Callable[[RequestPreparer], Result], size: int) -> Result:
        """Call `make` for text of `size` characters, in a worker thread if it is long."""
        if size <= _SHORT_TEXT:
            return make(self.preparer)
        return await self._texts.run(functools.partial(make, self.preparer))

    async def predict(self, prompt: Prompt, text: str) -> Prompt:
        """Add text that the answer probably repeats. Raises InvalidRequestError for a too long text."""

        def encode(preparer: RequestPreparer) -> list[int]:
            return preparer.encode(text, add_special_tokens=False, param="prediction")

        return msgspec.structs.replace(prompt, prediction=await self.text(encode, len(text)))

    async def check_grammar(self, grammar: Grammar, tools: ToolUse | None = None) -> list[str]:
        """Takes and raises the same as the preparer."""
        check = functools.partial(self.preparer.answers.check_grammar, grammar, tools)
        if self.preparer.answers.knows_grammar(grammar):
            return check()
        try:
            return await self._grammars.run(functools.partial(check, quick=True))
        except SlowGrammarError:
            return await self._slow_grammars.run(check)

    async def read_file(self, work: Callable[[], Result]) -> Result:
        """Run work that may take as long as opening a file, in an image thread."""
        return await self._run(self._images, work)

    async def render(self, work: Callable[[], Result]) -> Result:
        return await self._run(self._files, work)

    async def fetch(self, url: str, limits: MediaConfig) -> bytes:
        """Fetch a file. Takes and raises the same as `fetch_file`."""
        return await self._run(self._fetches, functools.partial(fetch_file, url, limits))

    async def _run(self, workers: FairThreads, work: Callable[[], Result]) -> Result:
        try:
            return await workers.run(work)
        finally:
            if workers in self._media:
                self.memory.worked()

    async def prepare(
        self, messages: list[dict[str, Any]], known: KnownMedia | None = None, **options: Unpack[ConversationOptions]
    ) -> Prompt:
        """Make the prompt of a conversation in a worker thread. Takes and raises the same as the preparer."""
        shown = _shown(messages)
        conversation = self.preparer.conversation(messages, known, **options)
        workers = self._workers(shown)
        has_tools = options.get("tools") is not None

        def quickly() -> Prompt:
            with only_quick():
                return conversation.prompt()

        is_short = not (shown or has_tools) and sum(map(_num_characters, messages)) <= _SHORT_TEXT
        has_files = any(part["type"] != "image_url" for part in shown)
        try:
            # In `except`, the handled exception would keep the files in memory.
            with contextlib.suppress(SlowRenderingError):
                return quickly() if is_short else await self._run(workers, quickly)
            return await self._prepare_slowly(conversation, workers, has_files=has_files)
        except MemoryError:
            raise RefusedError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "There is not enough memory for these images", "out_of_memory"
            ) from None

    async def prepare_alike(
        self, conversations: Sequence[list[dict[str, Any]]], known: KnownMedia, **options: Unpack[ConversationOptions]
    ) -> list[Prompt | InvalidRequestError | None]:
        """Make prompts in one worker thread, with media that `known` contains.

        Errors take the places of prompts. None: the chat template takes long, so `prepare` must make this prompt.
        """

        def make(messages: list[dict[str, Any]]) -> Prompt | InvalidRequestError | None:
            try:
                return self.preparer.conversation(messages, known, **options).prompt()
            except SlowRenderingError:
                return None
            except InvalidRequestError as error:
                return error

        def make_quickly(some: Sequence[list[dict[str, Any]]]) -> list[Prompt | InvalidRequestError | None]:
            with only_quick():
                return [make(messages) for messages in some]

        made: list[Prompt | InvalidRequestError | None] = []
        for start in range(0, len(conversations), _ALIKE):
            some = conversations[start : start + _ALIKE]
            made += await self._run(self._workers(_shown(some[0])), functools.partial(make_quickly, some))
        return made

    async def _prepare_slowly(self, conversation: Conversation, workers: FairThreads, *, has_files: bool) -> Prompt:
        """Prepare slowly. Few conversations at a time may keep files in memory."""
        with contextlib.ExitStack() as stack:
            if has_files:
                if waits := not self._slow_files.is_free:
                    conversation.forget()
                stack.callback(self._slow_files.release, await self._slow_files.acquire())
                if waits:
                    await self._run(workers, conversation.read)
            await self._slow_texts.run(conversation.render)
            return await self._run(workers, conversation.prompt)

    def _workers(self, shown: Sequence[Mapping[str, Any]]) -> FairThreads:
        if any(part["type"] in _FILES for part in shown):
            return self._files
        if any(not url.startswith("data:") for part in shown for url in _urls(part)):
            return self._fetches
        return self._images if shown else self._texts


def _shown(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    return [part for content in contents for part in content if part["type"] != "text"]


def _num_characters(message: Mapping[str, Any]) -> int:
    content = message["content"]
    said = len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)
    return said + len(str(message.get("tool_calls", ""))) + len(message.get("reasoning_content", ""))


def _urls(part: Mapping[str, Any]) -> Sequence[str]:
    kind = part["type"]
    return part["video"] if kind == "video" else (part[kind]["url"],)


class IdleMemory:
    """Gives memory back to the system when no work runs: the C library keeps freed memory.

    executor: runs the call. is_busy: returns whether work runs.
    """

    def __init__(self, executor: Executor, is_busy: Callable[[], bool]) -> None:
        self._executor = executor
        self._is_busy = is_busy
        self._timer: asyncio.TimerHandle | None = None

    def worked(self) -> None:
        if self._timer is None:
            self._wait()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_PAUSE, self._look)

    def _look(self) -> None:
        if self._is_busy():
            self._wait()
            return
        self._timer = None
        with contextlib.suppress(RuntimeError):  # the server closes
            self._executor.submit(return_free_memory)
