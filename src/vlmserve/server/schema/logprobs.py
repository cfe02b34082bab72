"""How likely tokens were, as OpenAI's two ways of completing write it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from vlmserve.errors import InvalidRequestError
from vlmserve.types import TokenLogprobs

TokenBytes = Callable[[int], bytes]
"""The bytes that a token stands for, by its id."""


@dataclass(frozen=True)
class TokenNames:
    """How responses write tokens. as_ids: by their ids instead of their text."""

    token_bytes: TokenBytes
    as_ids: bool = False

    def text(self, token_id: int) -> str:
        """With replacement characters for bytes that are no text alone."""
        return _by_id(token_id) if self.as_ids else self.token_bytes(token_id).decode(errors="replace")

    def key(self, token_id: int) -> str:
        """Different for different bytes."""
        return _by_id(token_id) if self.as_ids else _as_key(self.token_bytes(token_id))


def _by_id(token_id: int) -> str:
    return f"token_id:{token_id}"


class PromptLogprob(msgspec.Struct):
    """How likely a token of the prompt was, or a token in its place. rank: 1 for the likeliest token."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""The tokens of a prompt and their alternatives by token id; null for the first token and for images."""


def prompt_logprobs(logprobs: Iterable[TokenLogprobs | None], names: TokenNames) -> PromptLogprobs:
    """In vLLM's form."""

    def entry(token_id: int, logprob: float, rank: int) -> PromptLogprob:
        return PromptLogprob(max(logprob, _LEAST), rank, names.text(token_id))

    def entries(token: TokenLogprobs) -> dict[int, PromptLogprob]:
        others = {other: entry(other, score, rank) for rank, (other, score) in enumerate(token.top, start=1)}
        return others | {token.token_id: entry(token.token_id, token.logprob, token.rank)}

    return [None if token is None else entries(token) for token in logprobs]


_LEAST = -9999.0
"""What OpenAI writes for a token that could not come; JSON has no infinity."""


class Alternative(msgspec.Struct):
    """A token that might have come. token: its text, with replacement characters for bytes that are no text alone."""

    token: str
    logprob: float
    bytes: list[int]


class ContentToken(Alternative):
    """A token of an answer."""

    top_logprobs: list[Alternative]


class ChoiceLogprobs(msgspec.Struct):
    """The tokens of an answer to a chat, or of a piece of it."""

    content: list[ContentToken]
    refusal: None = None


def check_top_logprobs(wanted: int | None, most: int) -> None:
    """Raises InvalidRequestError for more alternatives than the server gives."""
    if (wanted or 0) > most:
        raise InvalidRequestError(f"top_logprobs must be at most {most} here", param="top_logprobs")


def choice_logprobs(logprobs: Iterable[TokenLogprobs], names: TokenNames) -> ChoiceLogprobs:
    """In the form of chat completions."""

    def alternative(token_id: int, logprob: float) -> Alternative:
        return Alternative(names.text(token_id), max(logprob, _LEAST), list(names.token_bytes(token_id)))

    content = []
    for token in logprobs:
        own = alternative(token.token_id, token.logprob)
        top = [alternative(*other) for other in token.top]
        content.append(ContentToken(own.token, own.logprob, own.bytes, top))
    return ChoiceLogprobs(content)


class CompletionLogprobs(msgspec.Struct):
    """The tokens of a completion, column by column. text_offset: characters of the choice's text before each; null
    stands for the logprobs of a prompt's first token."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []

    def add(self, token_id: int, logprobs: TokenLogprobs | None, offset: int, names: TokenNames) -> None:
        """One more token."""
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
    """Text, or what OpenAI writes for bytes that are none alone: many of them would read alike."""
    try:
        return written.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)


def offsets_in(text: str, tokens: Iterable[bytes]) -> list[int]:
    """Where in a text each of the tokens begins that a tokenizer made of it, in characters.

    Tokens that were added to it have no width, and spaces in front that it does not have do not count.
    """
    written = text.encode()
    place = num_characters = 0
    offsets = []
    for token in tokens:
        offsets.append(num_characters)
        for form in (token, token.lstrip(b" ")):
            if written.startswith(form, place):
                # Every character has one byte that does not continue another one.
                num_characters += sum(byte & 0xC0 != 0x80 for byte in form)
                place += len(form)
                break
    return offsets
