"""Answer a batch with the engine in this process or with a running server."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, Protocol

import msgspec

from vlmserve.batch.journal import Result
from vlmserve.errors import InvalidRequestError, VLMServeError
from vlmserve.frontend.wire import connect, connection_problem, error_text, wire_message
from vlmserve.server.schema.batches import BatchLine
from vlmserve.settings.config import EngineConfig, MediaConfig
from vlmserve.types import Grammar, SamplingParams

ATTEMPTS = 6
"""Tries of a request to a server that is overloaded or unreachable."""
LONGEST_PAUSE = 30.0

Conversation = list[dict[str, Any]]


class Chat(NamedTuple):
    """The conversation of a row without a request."""

    messages: Conversation
    params: SamplingParams


Ask = Chat | BatchLine


class BatchAnswers(Protocol):
    name: str

    def answer(self, asks: Sequence[Ask]) -> Iterator[tuple[int, Result]]:
        """Yield index and result of each ask, in any order.

        Raises VLMServeError if no more answers can be expected.
        """
        ...


class LocalAnswers:
    def __init__(self, engine: EngineConfig, media: MediaConfig) -> None:
        from vlmserve.offline.llm import LLM

        self.llm = LLM(**engine.model_dump(exclude_unset=True), **media.model_dump(exclude_unset=True))
        self.name = self.llm.config.model

    def answer(self, asks: Sequence[Ask]) -> Iterator[tuple[int, Result]]:
        read: list[tuple[int, Chat, dict[str, Any]]] = []
        for number, ask in enumerate(asks):
            try:
                read.append((number, *((ask, {}) if isinstance(ask, Chat) else self._read(ask))))
            except InvalidRequestError as error:
                yield number, Result(error=str(error))
        # `LLM.chat` takes one set of options for all conversations.
        for options, group in itertools.groupby(read, key=lambda one: one[2]):
            yield from self._answer([(number, chat) for number, chat, _ in group], options)

    def _answer(self, asked: Sequence[tuple[int, Chat]], options: dict[str, Any]) -> Iterator[tuple[int, Result]]:
        outcomes = self.llm.chat(
            [chat.messages for _, chat in asked],
            [chat.params for _, chat in asked],
            use_tqdm=False,
            stream=True,
            on_error="return",
            **options,
        )
        for place, ((number, _), outcome) in enumerate(zip(asked, outcomes, strict=True)):
            if isinstance(outcome, InvalidRequestError):
                yield number, Result(error=str(outcome).removeprefix(f"conversations[{place}], "))
                continue
            [output] = outcome.outputs
            if output.finish_reason == "error":
                yield number, Result(error=output.error or "the request failed")
                continue
            tokens = len(outcome.prompt_token_ids), len(output.token_ids)
            yield number, Result(output.text, output.finish_reason, "", *tokens)

    def _read(self, line: BatchLine) -> tuple[Chat, dict[str, Any]]:
        """A request's conversation and options. Raises InvalidRequestError."""
        from vlmserve.server.schema.base import validate
        from vlmserve.server.schema.chat import ChatRequest
        from vlmserve.server.schema.content import conversation

        if line.url != "/v1/chat/completions":
            raise InvalidRequestError(f"{line.url} needs a server (--url); this process answers /v1/chat/completions")
        check_body(line.body)
        body = validate(ChatRequest, line.body)
        params = body.sampling_params(self.llm.default_sampling_params, body.token_limit, 1)
        if body.token_limit is None:
            params = msgspec.structs.replace(params, max_tokens=None)
        settings = body.template_settings(self.llm.template_settings)
        options = {
            "chat_template_kwargs": settings or None,
            "cache_salt": body.cache_salt,
            "mm_processor_kwargs": body.processor_kwargs,
        }
        return Chat(conversation(body.messages), params), options


def check_body(body: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError unless the answer is one text."""
    for field, neutral in (("n", 1), ("best_of", 1), ("stream", False), ("use_beam_search", False), ("tools", [])):
        if body.get(field) not in (None, neutral):
            raise InvalidRequestError(f"{field} is not supported here, because an answer is one text; use /v1/batches")


class ServerAnswers:
    """Answers with a server (see `connect`). model: replaces requests'. concurrency: in flight."""

    def __init__(self, url: str, model: str | None, concurrency: int) -> None:
        self._client, self.name = connect(url, model, concurrency)
        self._model = model
        self._concurrency = concurrency

    def answer(self, asks: Sequence[Ask]) -> Iterator[tuple[int, Result]]:
        waiting = iter(enumerate(asks))
        running: dict[Future[Result], int] = {}
        with ThreadPoolExecutor(self._concurrency) as pool:
            try:
                while True:
                    for number, ask in itertools.islice(waiting, self._concurrency - len(running)):
                        running[pool.submit(self.ask, ask)] = number
                    if not running:
                        return
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        yield running.pop(future), future.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def ask(self, ask: Ask) -> Result:
        if isinstance(ask, Chat):
            messages = [wire_message(message) for message in ask.messages]
            return self._post(
                "/chat/completions", {"model": self.name, **_wire_params(ask.params), "messages": messages}
            )
        try:
            check_body(ask.body)
        except InvalidRequestError as error:
            return Result(error=str(error))
        named = {} if self._model is None else {"model": self._model}
        return self._post(ask.url.removeprefix("/v1"), {"model": self.name, **ask.body, **named})

    def _post(self, path: str, body: dict[str, Any]) -> Result:
        import httpx

        for attempt in range(1, ATTEMPTS + 1):
            last = attempt == ATTEMPTS
            pause = min(0.5 * 2**attempt, LONGEST_PAUSE)
            try:
                response = self._client.post(path, json=body)
            except httpx.HTTPError as error:
                if last:
                    raise VLMServeError(f"the server stopped answering: {connection_problem(error)}") from error
                time.sleep(pause)
                continue
            if response.status_code == 200:
                return _result(path, response)
            if response.status_code in (401, 403):
                raise VLMServeError(error_text(response))
            if last or response.status_code not in (429, 502, 503, 504):
                break
            time.sleep(min(_seconds(response.headers.get("Retry-After")) or pause, LONGEST_PAUSE))
        return Result(error=error_text(response))


def _wire_params(params: SamplingParams) -> dict[str, Any]:
    body: dict[str, Any] = {"temperature": params.temperature}
    if params.max_tokens is not None:
        body["max_tokens"] = params.max_tokens
    if params.seed is not None:
        body["seed"] = params.seed
    if params.grammar is not None:
        body["response_format"] = _response_format(params.grammar)
    return body


def _response_format(grammar: Grammar) -> dict[str, Any]:
    schema = msgspec.json.decode(grammar.text)
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": grammar.strict}}


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    """Answer of ``/v1/chat/completions`` or ``/v1/completions``."""

    choices: list[_Choice]
    usage: _Usage | None = None

    def result(self) -> Result:
        choice, usage = self.choices[0], self.usage or _Usage()
        text = choice.text if choice.message is None else choice.message.content
        return Result(text or "", choice.finish_reason or "stop", "", usage.prompt_tokens, usage.completion_tokens)


class _Part(msgspec.Struct):
    text: str = ""


class _Item(msgspec.Struct):
    type: str
    content: list[_Part] | None = None


class _Response(msgspec.Struct):
    """Answer of ``/v1/responses``."""

    output: list[_Item]
    status: str
    usage: _Usage | None = None

    def result(self) -> Result:
        usage = self.usage or _Usage()
        text = "".join(part.text for item in self.output if item.type == "message" for part in item.content or ())
        reason = "stop" if self.status == "completed" else "length"
        return Result(text, reason, "", usage.input_tokens, usage.output_tokens)


def _result(path: str, response: Any) -> Result:
    kind: type[_Response] | type[_Completion] = _Response if path == "/responses" else _Completion
    try:
        return msgspec.json.decode(response.content, type=kind).result()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, IndexError) as error:
        sent = response.headers.get("content-type", "no content type")
        return Result(error=f"{response.url} answered 200 with {sent:.40}, not an answer of this API: {error!s:.80}")


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
