"""Reads one answer as it arrives: times of its pieces, and the server's token counts."""

from __future__ import annotations

from array import array

import msgspec

from vlmserve.loadtest.client import RequestFailedError
from vlmserve.types import Missed

MAX_EVENT = 16 * 1024**2
"""Maximum bytes of an event or an error."""

_FAILED = 400
_NOTHING = msgspec.Raw(b"null")


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw = _NOTHING


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    message: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    missed_tokens: Missed | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw = _NOTHING


class _Error(msgspec.Struct):
    """An error in OpenAI's form, perhaps without the outer object."""

    message: object = None
    code: object = None
    type: object = None
    error: msgspec.Raw = _NOTHING


_chunk = msgspec.json.Decoder(_Chunk)


class Answer:
    """Reads the body of a completion, streamed or not.

    times: arrival of each piece with text, reasoning or tool calls. num_tokens: by the server's count, if any.
    is_whole: the server marked the end.
    """

    __slots__ = (
        "_error", "_keeps_text", "_rest", "_streams", "_text", "cached_tokens", "ended", "is_whole",
        "missed_tokens", "num_prompt_tokens", "num_tokens", "times",
    )  # fmt: skip

    def __init__(self, *, streams: bool = True, keeps_text: bool = False) -> None:
        self.times: array[float] = array("d")
        self.num_tokens: int | None = None
        self.num_prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.missed_tokens: Missed | None = None
        self.is_whole = False
        self.ended = 0.0
        self._streams, self._keeps_text = streams, keeps_text
        self._text: list[str] = []
        self._rest = b""
        self._error = b""

    @property
    def text(self) -> str:
        """The text; empty unless `keeps_text`."""
        return "".join(self._text)

    def feed(self, status: int, data: bytes, now: float) -> None:
        """Add a piece. Raises RequestFailedError for an error event, or another body."""
        self.ended = now
        if status >= _FAILED:
            if len(self._error) < MAX_EVENT:
                self._error += data
            return
        data = self._rest + data if self._rest else data
        if not self._streams:
            self._rest = data
            return
        lines = data.split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_EVENT:
            raise RequestFailedError("broken stream", f"an event is larger than {MAX_EVENT} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def check(self, status: int) -> None:
        """Raises RequestFailedError unless the answer is complete."""
        if status >= _FAILED:
            raise http_failure(status, self._error)
        if not self._streams:
            self._event(self._rest, self.ended)
        if not self.is_whole:
            raise RequestFailedError("broken stream", "the stream ended before the answer was complete")

    def _event(self, data: bytes, now: float) -> None:
        if not data and self._streams:  # keeps a connection open
            return
        if data == b"[DONE]":
            self.is_whole = True
            return
        try:
            chunk = _chunk.decode(data)
        except msgspec.DecodeError as error:
            raise RequestFailedError("broken stream", f"an event is not a completion: {error}") from None
        if chunk.error != _NOTHING:
            code, message = _describe(bytes(chunk.error))
            raise RequestFailedError(f"error in the stream{code}", message)
        if chunk.usage is not None:
            self.num_tokens = chunk.usage.completion_tokens
            self.num_prompt_tokens = chunk.usage.prompt_tokens
            if chunk.usage.prompt_tokens_details is not None:
                self.cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens
                self.missed_tokens = chunk.usage.prompt_tokens_details.missed_tokens
        for choice in chunk.choices or ():
            self._choice(choice, now)

    def _choice(self, choice: _Choice, now: float) -> None:
        if choice.finish_reason is not None:
            self.is_whole = True
        delta = choice.delta or choice.message
        text = choice.text if delta is None else delta.content
        thought = delta is not None and (delta.reasoning_content or delta.reasoning or delta.tool_calls != _NOTHING)
        if text or thought:
            self.times.append(now)
            if text and self._keeps_text:
                self._text.append(text)


def http_failure(status: int, body: bytes) -> RequestFailedError:
    code, message = _describe(body)
    return RequestFailedError(f"HTTP {status}{code}", message)


def _describe(body: bytes) -> tuple[str, str]:
    try:
        error = msgspec.json.decode(body, type=_Error)
        if bytes(error.error)[:1] == b"{":
            error = msgspec.json.decode(error.error, type=_Error)
    except msgspec.DecodeError:
        return "", body[:300].decode(errors="replace")
    name = error.code if isinstance(error.code, str) else error.type
    return (f" {name}" if isinstance(name, str) and name else ""), str(error.message or "")[:300]
