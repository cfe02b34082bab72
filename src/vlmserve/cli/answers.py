"""Answers for `ask` and `chat`, from an engine or a server."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import msgspec

from vlmserve.errors import VLMServeError
from vlmserve.frontend.wire import connect, error_text, wire_message
from vlmserve.settings.config import EngineConfig, MediaConfig
from vlmserve.types import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from vlmserve.offline.llm import LLM


class ShownThoughts:
    """Prints reasoning, dim, on separate lines."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun = False

    def show(self, text: str) -> None:
        self._begun = True
        self._console.out(text, end="", style="dim", highlight=False)

    def end(self) -> None:
        if self._begun:
            self._console.print()
        self._begun = False


def open_answers(engine: EngineConfig, media: MediaConfig, url: str | None) -> LLM | ServerAnswers:
    """Connect to `url`, or load an engine. Raises VLMServeError."""
    return ServerAnswers(url) if url is not None else open_llm(engine, media)


def open_llm(engine: EngineConfig, media: MediaConfig) -> LLM:
    """Raises VLMServeError."""
    with status(f"Loading {engine.model} ..."):
        from vlmserve.offline.llm import LLM

        return LLM(**engine.model_dump(exclude_unset=True), **media.model_dump(exclude_unset=True))


def describes(engine: EngineConfig) -> bool:
    """True if the local model captions images without a question."""
    from vlmserve.models.hub import resolve_model
    from vlmserve.prompt.files import read_json
    from vlmserve.prompt.one_image import one_image_prompts

    prompts = one_image_prompts(read_json(resolve_model(engine.model, engine.revision, engine.mmproj) / "config.json"))
    return prompts is not None and prompts.describes


def status(text: str) -> AbstractContextManager[Any]:
    from rich.console import Console

    console = Console(stderr=True)
    return console.status(text) if console.is_terminal else nullcontext()


class ServerAnswers:
    """Streams answers like `LLM`."""

    def __init__(self, url: str) -> None:
        self._client, self._model = connect(url)
        self._url = url

    def stream(
        self, messages: list[dict[str, Any]], params: SamplingParams, *, on_thought: Callable[[str], None] | None = None
    ) -> Iterator[str]:
        import httpx

        body = {
            "model": self._model,
            "messages": [wire_message(message) for message in messages],
            "temperature": params.temperature,
            "stream": True,
        }
        if params.max_tokens is not None:
            body["max_tokens"] = params.max_tokens
        try:
            with self._client.stream("POST", "/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise VLMServeError(_named(error_text(response), _error_param(response), messages))
                yield from deltas(self._url, response.iter_lines(), on_thought)
        except httpx.HTTPError as error:
            raise VLMServeError(f"the server at {self._url} did not answer: {error}") from error


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None


class _Error(msgspec.Struct):
    message: str


class _Event(msgspec.Struct):
    """A chunk of an answer, or an error event."""

    choices: list[_Choice] | None = None
    error: _Error | str | None = None


def deltas(url: str, lines: Iterator[str], on_thought: Callable[[str], None] | None) -> Iterator[str]:
    """Yield a stream's text. Raises VLMServeError for errors and other data."""
    is_stream = False
    for line in lines:
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "":
            continue
        is_stream = True
        if data == "[DONE]":
            continue
        try:
            event = msgspec.json.decode(data, type=_Event)
        except (msgspec.MsgspecError, RecursionError):
            raise VLMServeError(f"{url} sent an event that is no chat completion chunk: {data:.60}") from None
        if event.error is not None:
            raise VLMServeError(event.error if isinstance(event.error, str) else event.error.message)
        for delta in (choice.delta for choice in event.choices or () if choice.delta is not None):
            if on_thought is not None and delta.reasoning_content:
                on_thought(delta.reasoning_content)
            if delta.content:
                yield delta.content
    if not is_stream:
        raise VLMServeError(f"{url} answered without a stream of events; give the URL of an OpenAI-compatible API")


def _error_param(response: Any) -> str:
    try:
        return str(response.json()["error"]["param"])
    except (ValueError, KeyError, TypeError):
        return ""


def _named(text: str, param: str, messages: list[dict[str, Any]]) -> str:
    """Replace an image's place in an error by its file name."""
    place = re.match(r"messages\[(\d+)\]\.content\[(\d+)\]\.image_url", param)
    if place is None:
        return text
    content = messages[int(place[1])]["content"]
    part = content[int(place[2])] if int(place[2]) < len(content) else {}
    return f"{part['image']}: {text}" if "image" in part else text
