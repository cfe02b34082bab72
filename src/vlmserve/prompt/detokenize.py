"""Incremental detokenization with stop strings."""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from vlmserve.prompt.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 4
"""Maximum bytes, and therefore tokens, of a UTF-8 character."""


class Detokenizer:
    """Turns token ids of one answer into text.

    The text equals `Tokenizer.decode` of all ids, except for invalid UTF-8: an unfinished character at the end is
    dropped, and valid characters next to invalid bytes are kept.

    stop: strings that end the answer, which is cut before the first completed string, on ties the longest. shown_ids:
    control tokens to show. min_tokens: stop strings within these tokens do not count. keeps_stop: include the stop
    string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        shown_ids: frozenset[int] = frozenset(),
        *,
        min_tokens: int = 0,
        keeps_stop: bool = False,
    ) -> None:
        self._min_tokens, self._keeps_stop = min_tokens, keeps_stop
        self._special_ids = tokenizer.special_ids - shown_ids
        self._decoder = _make_decoder(tokenizer)
        self._stops = [_StopString(string) for string in stop]
        self._held: deque[str] = deque()
        self._emitted: list[str] = []
        self.num_decoded = self.num_shown = 0
        """Characters of all tokens, and returned characters."""
        self.num_tokens = 0
        """Tokens of the answer, up to the token that completed a stop string."""
        self.num_tokens_before = 0
        """Tokens of the reasoning before the answer."""
        self.stop_string: str | None = None
        """The completed stop string; nothing follows it."""

    @property
    def stopped(self) -> bool:
        return self.stop_string is not None

    @property
    def text(self) -> str:
        if len(self._emitted) > 1:
            self._emitted = ["".join(self._emitted)]
        return self._emitted[0] if self._emitted else ""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that can be shown, in amortized constant time per token."""
        if self.stopped:
            return ""
        if self._stops:
            return "".join(self._push_one(token_id) for token_id in token_ids)
        new = "".join(self._decoder.push(id_) for id_ in token_ids if id_ not in self._special_ids)
        self.num_decoded += len(new)
        self.num_tokens += len(token_ids)
        return self._emit(new)

    def _push_one(self, token_id: int) -> str:
        if self.stopped:
            return ""
        self.num_tokens += 1
        new = "" if token_id in self._special_ids else self._decoder.push(token_id)
        self.num_decoded += len(new)
        return self._emit(self._before_stop(new))

    def finish(self, end_token_id: int | None = None) -> str:
        """Return the text held back for stop strings. `push` may not follow.

        end_token_id: the token that ended the answer, if its text is part of the answer.
        """
        if self.stopped:
            return ""
        is_shown = end_token_id is not None and end_token_id not in self._special_ids
        rest = self._decoder.push(end_token_id) if end_token_id is not None and is_shown else ""
        rest += self._decoder.finish()
        self.num_decoded += len(rest)
        rest = self._before_stop(rest) if self._stops else rest
        return self._emit(rest + self._release(len(self._held)))

    def _emit(self, text: str) -> str:
        if text:
            self._emitted.append(text)
            self.num_shown += len(text)
        return text

    def _before_stop(self, new: str) -> str:
        for position, character in enumerate(new, start=1):
            completed = [stop.string for stop in self._stops if stop.advance(character)]
            if completed and self.num_tokens_before + self.num_tokens > self._min_tokens:
                self.stop_string = max(completed, key=len)
                self._held.extend(new[:position])
                return self._release(len(self._held) - (0 if self._keeps_stop else len(self.stop_string)))
        self._held.extend(new)
        return self._release(len(self._held) - max(stop.matched for stop in self._stops))

    def _release(self, count: int) -> str:
        return "".join(self._held.popleft() for _ in range(count))


class _StopString:
    """Knuth-Morris-Pratt matching, one character at a time."""

    def __init__(self, string: str) -> None:
        self.string = string
        self.matched = 0
        self._fallback = [0]
        for character in string[1:]:
            length = self._fallback[-1]
            while length and string[length] != character:
                length = self._fallback[length - 1]
            self._fallback.append(length + 1 if string[length] == character else 0)

    def advance(self, character: str) -> bool:
        while self.matched and (self.matched == len(self.string) or self.string[self.matched] != character):
            self.matched = self._fallback[self.matched - 1]
        if self.string[self.matched] == character:
            self.matched += 1
        return self.matched == len(self.string)


class _Decoder(Protocol):
    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


def token_bytes(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """Return a function from a token id to its bytes after other tokens; empty for an unknown id."""
    rule = byte_rule(tokenizer)

    def bytes_of(token_id: int) -> bytes:
        token = tokenizer.token(token_id)
        if token is None:
            return b""
        if rule is not None:
            return rule.to_bytes(token)
        # some tokens differ at the beginning of a text
        once, twice = (tokenizer.decode([token_id] * times, skip_special_tokens=False) for times in (1, 2))
        return twice[len(once) :].encode()

    return bytes_of


def _make_decoder(tokenizer: Tokenizer) -> _Decoder:
    rule = byte_rule(tokenizer)
    return _WindowDecoder(tokenizer) if rule is None else _ByteDecoder(tokenizer, rule)


class ByteRule(NamedTuple):
    """How tokens encode bytes. stripped: leading spaces that a text loses."""

    to_bytes: Callable[[str], bytes]
    stripped: int = 0


def byte_rule(tokenizer: Tokenizer) -> ByteRule | None:
    """None: the bytes of a token depend on its neighbors."""
    decoder = tokenizer.decoder_steps
    steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteRule(_byte_level_bytes)
    if "ByteFallback" in kinds and _is_sentencepiece(steps):
        replaced = [(step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"]
        stripped = sum(step["start"] for step in steps if step["type"] == "Strip")
        return ByteRule(lambda token: _sentencepiece_bytes(token, replaced), stripped)
    return None


def _is_sentencepiece(steps: list[dict[str, Any]]) -> bool:
    """Return whether the steps are: replace, byte fallback, fuse, strip leading spaces."""
    letters = {"Replace": "R", "ByteFallback": "B", "Fuse": "F", "Strip": "S"}
    if not re.fullmatch("R*BF?(FS)?", "".join(letters.get(step["type"], "?") for step in steps)):
        return False
    return all(
        (step["type"] != "Replace" or "String" in step["pattern"])
        and (step["type"] != "Strip" or (step["content"] == " " and step["stop"] == 0))
        for step in steps
    )


class _ByteDecoder:
    def __init__(self, tokenizer: Tokenizer, rule: ByteRule) -> None:
        self._tokenizer = tokenizer
        self._to_bytes, self._spaces_to_strip = rule
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        token = self._tokenizer.token(token_id)
        text = self._utf8.decode(self._to_bytes(token)) if token is not None else ""
        while text and self._spaces_to_strip:
            if text[0] != " ":
                self._spaces_to_strip = 0
                break
            text = text[1:]
            self._spaces_to_strip -= 1
        return text

    def finish(self) -> str:
        return ""


def _byte_level_alphabet() -> dict[str, int]:
    """Map byte-level BPE's characters to bytes (https://github.com/openai/gpt-2, ``bytes_to_unicode``)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(_BYTE_LEVEL[character] for character in token)
    except KeyError:  # added tokens are plain text
        return token.encode()


def _sentencepiece_bytes(token: str, replaced: list[tuple[str, str]]) -> bytes:
    for old, new in replaced:
        token = token.replace(old, new)
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.encode()


class _WindowDecoder:
    """Decodes the last few tokens with and without the new one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._pending_text()
        if text.endswith(_REPLACEMENT) and len(self._pending) < _LONGEST_CHARACTER:
            return ""
        self._shown = (self._shown + self._pending)[-_LONGEST_CHARACTER:]
        self._pending = []
        return text

    def finish(self) -> str:
        return self._pending_text().rstrip(_REPLACEMENT)

    def _pending_text(self) -> str:
        before = self._tokenizer.decode(self._shown, skip_special_tokens=False)
        return self._tokenizer.decode(self._shown + self._pending, skip_special_tokens=False)[len(before) :]
