"""The server under test: model, extensions, tokens per word."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vlmserve.errors import ConfigurationError, VLMServeError
from vlmserve.loadtest.answer import Answer, http_failure
from vlmserve.loadtest.client import Client, RequestFailedError
from vlmserve.loadtest.settings import TargetConfig, TestConfig
from vlmserve.loadtest.text import ANCHOR, WORDS, Vocabulary
from vlmserve.loadtest.wire import RequestFormat
from vlmserve.loadtest.workload import user_message

_CONTROL_TIMEOUT = 10.0
"""Timeout in seconds for requests that run no model."""
_COPIES = 16
"""Repetitions of a word to measure its tokens."""
_AT_ONCE = 16
"""Concurrent requests for words' tokens."""
_REFUSED = (400, 404, 405, 422, 501)
"""Statuses of servers that do not know a field or path."""
_KEY_VARIABLES = ("VLMSERVE_API_KEY", "OPENAI_API_KEY")


class TargetError(VLMServeError):
    """The server does not answer, or rejects the first request."""


@dataclass
class Target:
    url: str
    client: Client
    """For measured requests."""
    control: Client
    """For all other requests."""
    form: RequestFormat
    model: str
    max_model_len: int | None = None
    """Context length in tokens, if the server tells."""
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    has_metrics: bool = False
    notes: list[str] = field(default_factory=list)
    """Sentences that a reader of the figures must know."""

    def close(self) -> None:
        self.client.close()
        self.control.close()


async def open_target(config: TestConfig) -> Target:
    """Find the model, try a request, and measure words' tokens.

    Raises TargetError, or ConfigurationError for wrong settings.
    """
    settings = config.target
    url = config.url.rstrip("/").removesuffix("/v1")
    headers = _headers(settings)
    client = Client(url, headers=headers, timeout=settings.request_timeout, insecure=settings.insecure)
    control = Client(url, headers=headers, timeout=_CONTROL_TIMEOUT, insecure=settings.insecure)
    model, max_model_len = await _find_model(control, settings.model, url)
    form, notes = await _probe(client, settings, model, url)
    target = Target(url, client, control, form, model, max_model_len, notes=notes)
    target.has_metrics = await _status(control, "/metrics") == 200
    if config.workload.dataset_path is None:
        target.vocabulary = await _vocabulary(target)
        _check_lengths(config, max_model_len)
    return target


def _headers(settings: TargetConfig) -> list[tuple[str, str]]:
    headers = []
    for text in settings.header:
        name, colon, value = text.partition(":")
        if not colon or not name.strip():
            raise ConfigurationError(f"--header {text!r}: write 'Name: value'")
        headers.append((name.strip(), value.strip()))
    key = settings.api_key or next((os.environ[name] for name in _KEY_VARIABLES if os.environ.get(name)), "")
    # VLMSERVE_API_KEY may hold several keys.
    key = key.partition(",")[0].strip()
    return [*headers, ("Authorization", f"Bearer {key}")] if key else headers


async def _status(client: Client, path: str) -> int:
    try:
        return (await client.fetch("GET", path))[0]
    except RequestFailedError:
        return 0


async def _find_model(client: Client, wanted: str | None, url: str) -> tuple[str, int | None]:
    """Model name and context length. Trusts a server that lists no models."""
    try:
        status, body = await client.fetch("GET", "/v1/models")
    except RequestFailedError as error:
        raise TargetError(f"there is no server at {url}/v1/models: {error}") from None
    if status in (401, 403):
        raise TargetError(f"{url}/v1/models needs a key ({http_failure(status, body)}); give --api-key")
    models: list[dict[str, Any]] = []
    if status == 200:
        try:
            models = msgspec.json.decode(body)["data"]
        except (msgspec.DecodeError, KeyError, TypeError):
            models = []
    chosen = next((model for model in models if wanted in (None, model.get("id"))), None)
    if wanted is None and chosen is None:
        raise TargetError(f"{url}/v1/models lists no model (status {status}); name one with --model")
    length = chosen.get("max_model_len") if chosen else None
    return wanted or str(chosen and chosen.get("id")), length if isinstance(length, int) else None


async def _probe(client: Client, settings: TargetConfig, model: str, url: str) -> tuple[RequestFormat, list[str]]:
    """Find the format with most accepted extensions, and notes on the others."""
    notes = []
    wanted = settings.ignore_eos
    exacts = [True, False] if wanted else [False]
    tries = [RequestFormat(settings, model, exact=e, usage=u) for u in (True, False) for e in exacts]
    error: RequestFailedError | None = None
    for form in tries:
        try:
            answer = await ask_once(client, form, "Say a word.", max_tokens=4)
        except RequestFailedError as failure:
            error = error or failure
            if failure.reason.split(" ")[1:2] not in [[str(status)] for status in _REFUSED]:
                break
            continue
        if wanted and not form.exact:
            notes.append("The server does not know ignore_eos: answers may end before their length.")
        if answer.num_tokens is None:
            notes.append("The server does not count tokens: pieces of the answers are counted instead.")
        return form, notes
    address = f"{url}{settings.endpoint}"
    raise TargetError(f"{address} rejected a short request: {error and error.reason}: {error}")


async def ask_once(client: Client, form: RequestFormat, text: str, *, max_tokens: int) -> Answer:
    """Raises RequestFailedError."""
    content = user_message(text) if form.is_chat else (msgspec.json.encode(text),)
    answer = Answer(streams=form.streams)
    answer.check(await client.send(form.request(client, [content], max_tokens), answer.feed))
    return answer


async def _vocabulary(target: Target) -> Vocabulary:
    """Measure words by the server's tokenizer, or their mean from two prompts' token counts."""
    anchor = await _count(target, [ANCHOR])
    if anchor is not None:
        costs: dict[str, float] = {}
        for start in range(0, len(WORDS), _AT_ONCE):
            words = WORDS[start : start + _AT_ONCE]
            counts = await asyncio.gather(*(_count(target, [ANCHOR, *[word] * _COPIES]) for word in words))
            costs |= {
                word: (count - anchor) / _COPIES
                for word, count in zip(words, counts, strict=True)
                if count is not None and count > anchor and (count - anchor) % _COPIES == 0
            }
        if costs:
            return Vocabulary(costs, anchor, is_exact=True)
    short, long = [await _prompt_tokens(target, words) for words in (WORDS[:16], WORDS[:144])]
    if short is None or long is None or long <= short:
        target.notes.append("The server does not count prompt tokens: each word counts as one.")
        return Vocabulary()
    target.notes.append("The server has no /tokenize: the lengths of prompts are approximate.")
    cost = (long - short) / (144 - 16)
    return Vocabulary(dict.fromkeys(WORDS, cost), cost)


async def _count(target: Target, words: Sequence[str]) -> int | None:
    """Tokens of a text; None if unknown."""
    body = {"model": target.model, "prompt": " ".join(words), "add_special_tokens": False}
    try:
        status, data = await target.control.fetch("POST", "/tokenize", msgspec.json.encode(body))
        count = msgspec.json.decode(data)["count"] if status == 200 else None
    except (RequestFailedError, msgspec.DecodeError, KeyError, TypeError):
        return None
    return count if isinstance(count, int) else None


async def _prompt_tokens(target: Target, words: Sequence[str]) -> int | None:
    try:
        return (await ask_once(target.client, target.form, " ".join(words), max_tokens=1)).num_prompt_tokens
    except RequestFailedError:
        return None


def _check_lengths(config: TestConfig, max_model_len: int | None) -> None:
    workload = config.workload
    longest = (1 + workload.random_range_ratio) * (workload.random_input_len + workload.random_output_len)
    wanted = int(longest * workload.turns) + workload.random_prefix_len
    if max_model_len is not None and wanted > max_model_len:
        raise ConfigurationError(
            f"prompts and answers of {wanted} tokens exceed the model's context of {max_model_len}; lower "
            "--random-input-len, --random-output-len or --turns"
        )
