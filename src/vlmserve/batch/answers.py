"""Who answers a batch: the engine in this process, or a server that runs already."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

from vlmserve.batch.journal import Result
from vlmserve.config import EngineConfig, MediaConfig
from vlmserve.errors import InvalidRequestError, VLMServeError
from vlmserve.frontend.wire import connect, connection_problem, error_text, wire_message
from vlmserve.types import Grammar, SamplingParams

ATTEMPTS = 6
"""How often a question is put to a server that is overloaded or cannot be reached."""
LONGEST_PAUSE = 30.0

Conversation = list[dict[str, Any]]


class BatchAnswers(Protocol):
    """Answers many conversations."""

    name: str

    def answer(self, conversations: Sequence[Conversation], params: SamplingParams) -> Iterator[tuple[int, Result]]:
        """The number of each conversation and what came of it, in any order.

        Raises VLMServeError where no further answer is to be expected.
        """
        ...


class LocalAnswers:
    """The engine in this process."""

    def __init__(self, engine: EngineConfig, media: MediaConfig) -> None:
        from vlmserve.llm import LLM

        self._llm = LLM(**engine.model_dump(exclude_unset=True), **media.model_dump(exclude_unset=True))
        self.name = self._llm.config.model

    def answer(self, conversations: Sequence[Conversation], params: SamplingParams) -> Iterator[tuple[int, Result]]:
        """See `BatchAnswers.answer`."""
        outcomes = self._llm.chat(iter(conversations), params, use_tqdm=False, stream=True, on_error="return")
        for number, outcome in enumerate(outcomes):
            if isinstance(outcome, InvalidRequestError):
                yield number, Result(error=str(outcome).removeprefix(f"conversations[{number}], "))
                continue
            [output] = outcome.outputs
            if output.finish_reason == "error":
                yield number, Result(error=output.error or "the request failed")
                continue
            tokens = len(outcome.prompt_token_ids), len(output.token_ids)
            yield number, Result(output.text, output.finish_reason, "", *tokens)


class ServerAnswers:
    """A server, as `connect` finds it. concurrency: how many questions it is asked at a time."""

    def __init__(self, url: str, model: str | None, concurrency: int) -> None:
        self._client, self.name = connect(url, model, concurrency)
        self._concurrency = concurrency

    def answer(self, conversations: Sequence[Conversation], params: SamplingParams) -> Iterator[tuple[int, Result]]:
        """See `BatchAnswers.answer`."""
        body = {"model": self.name, **_wire_params(params)}
        waiting = iter(enumerate(conversations))
        running: dict[Future[Result], int] = {}
        with ThreadPoolExecutor(self._concurrency) as pool:
            try:
                while True:
                    for number, conversation in itertools.islice(waiting, self._concurrency - len(running)):
                        running[pool.submit(self._ask, body, conversation)] = number
                    if not running:
                        return
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        yield running.pop(future), future.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, body: dict[str, Any], conversation: Conversation) -> Result:
        import httpx

        whole = {**body, "messages": [wire_message(message) for message in conversation]}
        for attempt in range(1, ATTEMPTS + 1):
            last = attempt == ATTEMPTS
            pause = min(0.5 * 2**attempt, LONGEST_PAUSE)
            try:
                response = self._client.post("/chat/completions", json=whole)
            except httpx.HTTPError as error:
                if last:
                    raise VLMServeError(f"the server does not answer any more: {connection_problem(error)}") from error
                time.sleep(pause)
                continue
            if response.status_code == 200:
                return _result(response.json())
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
    import msgspec

    schema = msgspec.json.decode(grammar.text)
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": grammar.strict}}


def _result(body: dict[str, Any]) -> Result:
    choice, usage = body["choices"][0], body.get("usage") or {}
    tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    return Result(choice["message"]["content"] or "", choice["finish_reason"] or "stop", "", *tokens)


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
