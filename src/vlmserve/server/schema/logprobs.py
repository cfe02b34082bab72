"""Logprobs in the forms of chat completions and completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from vlmserve.errors import InvalidRequestError
from vlmserve.types import TokenLogprobs

TokenBytes = Callable[[int], bytes]
"""Returns the bytes of a token by its id."""


@dataclass(frozen=True)
class TokenNames:
    """Names of tokens in responses. as_ids: use ids, not text."""

    token_bytes: TokenBytes
    as_ids: bool = False

    def text(self, token_id: int) -> str:
        """Return the token's text, with replacement characters for incomplete UTF-8."""
        return _by_id(token_id) if self.as_ids else self.token_bytes(token_id).decode(errors="replace")

    def key(self, token_id: int) -> str:
        """A name that is unique to the token's bytes."""
        return _by_id(token_id) if self.as_ids else _as_key(self.token_bytes(token_id))


def _by_id(token_id: int) -> str:
    return f"token_id:{token_id}"


class PromptLogprob(msgspec.Struct):
    """The logprob of a prompt token or of an alternative. rank: 1 for the most likely token."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""Logprobs of each prompt token and its alternatives, by token id; null for the first token and for images."""


def prompt_logprobs(logprobs: Iterable[TokenLogprobs | None], names: TokenNames) -> PromptLogprobs:
    """Convert logprobs of a prompt to vLLM's form."""

    def entry(token_id: int, logprob: float, rank: int) -> PromptLogprob:
        return PromptLogprob(max(logprob, _LEAST), rank, names.text(token_id))

    def entries(token: TokenLogprobs) -> dict[int, PromptLogprob]:
        others = {other: entry(other, score, rank) for rank, (other, score) in enumerate(token.top, start=1)}
        return others | {token.token_id: entry(token.token_id, token.logprob, token.rank)}

    return [None if token is None else entries(token) for token in logprobs]


_LEAST = -9999.0
"""OpenAI's logprob of an impossible token; JSON has no infinity."""


class Alternative(msgspec.Struct):
    """An alternative token. token: its text, with replacement characters for incomplete UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class ContentToken(Alternative):
    """A token of an answer."""

    top_logprobs: list[Alternative]


class ChoiceLogprobs(msgspec.Struct):
    """Logprobs of an answer in a chat, or of a piece of it."""

    content: list[ContentToken]
    refusal: None = None


def check_top_logprobs(wanted: int | None, most: int) -> None:
    """Raise InvalidRequestError for more alternatives than the server returns."""
    if (wanted or 0) > most:
        raise InvalidRequestError(f"top_logprobs must be at most {most} here", param="top_logprobs")


def choice_logprobs(logprobs: Iterable[TokenLogprobs], names: TokenNames) -> ChoiceLogprobs:
    """Convert logprobs to the form of chat completions."""

    def alternative(token_id: int, logprob: float) -> Alternative:
        return Alternative(names.text(token_id), max(logprob, _LEAST), list(names.token_bytes(token_id)))

    content = []
    for token in logprobs:
        own = alternative(token.token_id, token.logprob)
        top = [alternative(*other) for other in token.top]
        content.append(ContentToken(own.token, own.logprob, own.bytes, top))
    return ChoiceLogprobs(content)


class CompletionLogprobs(msgspec.Struct):
    """Logprobs of a completion in columns; null for a prompt's first token.

    text_offset: start of each token in the choice's text, in characters.
    """

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []

    def add(self, token_id: int, logprobs: TokenLogprobs | None, offset: int, names: TokenNames) -> None:
        self.tokens.append(names.key(token_id))
        self.token_logprobs.append(None if logprobs is None else max(logprobs.logprob, _LEAST))
        self.text_offset.append(offset)
        if logprobs is None:
            self.top_logprobs.append(None)
            return
        alternatives = {names.key(other): max(score, _LEAST) for other, score in reversed(logprobs.top)}
        alternatives = dict(reversed(alternatives.items()))
        alternatives.setdefault(self.tokens[-1], max(logprobs.logprob, _LEAST))
        self.top_logprobs.append(alternatives)


def _as_key(written: bytes) -> str:
    """The text, or OpenAI's form for bytes that are not UTF-8 and would otherwise share a name."""
    try:
        return written.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)


def offsets_in(text: str, tokens: Iterable[bytes]) -> list[int]:
    """The start of each token in a text, in characters.

    Special tokens that a tokenizer added have no width, nor have leading spaces that the text lacks.
    """
    written = text.encode()
    place = num_characters = 0
    offsets = []
    for token in tokens:
        offsets.append(num_characters)
        for form in (token, token.lstrip(b" ")):
            if written.startswith(form, place):
                # Continuation bytes of UTF-8 are 10xxxxxx; count the others.
                num_characters += sum(byte & 0xC0 != 0x80 for byte in form)
                place += len(form)
                break
    return offsets
