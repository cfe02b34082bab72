"""Probabilities of the values in a JSON answer."""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlmserve.errors import InvalidRequestError
from vlmserve.offline.outputs import CompletionOutput, RequestOutput

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r"true|false|null|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_REPLACEMENT = "\ufffd"
_DECODER = json.JSONDecoder()


def confidence(answer: Any) -> Any:
    """Return an answer's JSON, with a probability (0 to 1) in place of each string, number, ``true``, ``false`` and
    ``null``.

    `answer` is one of:

    - a `RequestOutput` or `CompletionOutput` of ``SamplingParams(logprobs=0, grammar=...)``
    - a server's chat completion with ``logprobs=True``, or one of its choices
    - a server's response with ``include=["message.output_text.logprobs"]``

    The latter two may be JSON or objects of the openai client. With several answers, the first counts.

    A value's probability is the product of its tokens' probabilities, including the token with a string's closing
    quote. They come from the model's own distribution, before temperature and before the schema excludes tokens. Tokens
    with only names, brackets or whitespace do not count.

    Raises InvalidRequestError for an answer without logprobs, or one that is not JSON.
    """
    return json_confidence(*_text_and_tokens(answer))


def json_confidence(text: str, tokens: Sequence[tuple[str | bytes, float]]) -> Any:
    """Like `confidence`, for a text and each token's text or bytes and logprob.

    Raises InvalidRequestError unless the tokens produce the text and it is JSON.
    """
    spans = _places(text, tokens)
    token_starts = [one.start for one in spans]
    token_ends = [one.end for one in spans]
    places = [0]
    for character in text:
        places.append(places[-1] + len(character.encode()))

    def probability(start: int, end: int) -> float:
        first, last = bisect_right(token_ends, places[start]), bisect_left(token_starts, places[end])
        return math.exp(math.fsum(one.logprob for one in spans[first:last]))

    try:
        value, end = _value(text, 0, probability)
        if _after_space(text, end) != len(text):
            raise ValueError(f"there is more after character {end}")
    except (ValueError, IndexError, RecursionError) as error:
        raise InvalidRequestError(f"the answer is no whole JSON ({error}): {text!r:.100}") from None
    return value


@dataclass(frozen=True)
class _Token:
    """start, end: bytes in the answer."""

    start: int
    end: int
    logprob: float


def _text_and_tokens(answer: Any) -> tuple[str, list[tuple[str | bytes, float]]]:
    if isinstance(answer, RequestOutput):
        answer = answer.outputs[0]
    if isinstance(answer, CompletionOutput):
        if answer.logprobs is None:
            raise InvalidRequestError("the answer has no logprobs; ask for them with SamplingParams(logprobs=0)")
        pairs = zip(answer.token_ids, answer.logprobs, strict=True)
        return answer.text, [(by_id[token].decoded_token, by_id[token].logprob) for token, by_id in pairs]
    fields = answer.model_dump() if hasattr(answer, "model_dump") else answer
    if isinstance(fields, Mapping) and fields.get("choices"):
        fields = fields["choices"][0]
    if isinstance(fields, Mapping) and "message" in fields:
        text, content = fields["message"]["content"] or "", (fields.get("logprobs") or {}).get("content")
    elif isinstance(fields, Mapping) and fields.get("object") == "response":
        texts = [part for item in fields["output"] if item["type"] == "message" for part in item["content"]]
        text, content = (texts[0]["text"], texts[0].get("logprobs") or None) if texts else ("", [])
    else:
        raise InvalidRequestError(
            "an answer is a RequestOutput, a CompletionOutput, a chat completion or its choice, or a response"
        )
    if content is None:
        raise InvalidRequestError(
            "the answer has no logprobs; ask for them with logprobs=True, or in responses with "
            'include=["message.output_text.logprobs"]'
        )
    shown = [
        (token["token"] if token.get("bytes") is None else bytes(token["bytes"]), token["logprob"]) for token in content
    ]
    return text, shown


def _places(text: str, tokens: Sequence[tuple[str | bytes, float]]) -> list[_Token]:
    """Locate tokens; those sharing a character all cover its bytes."""
    data = text.encode()
    placed: list[_Token] = []
    unknown: list[float] = []
    place = 0
    for shown, logprob in tokens:
        if isinstance(shown, str) and _REPLACEMENT in shown:
            unknown.append(logprob)
            continue
        own = shown if isinstance(shown, bytes) else shown.encode()
        found = data.find(own, place) if unknown else place
        if not data.startswith(own, found) and not placed:
            own = own.lstrip()  # decoding drops the first word's leading space
        if found < 0 or not data.startswith(own, found):
            if data[place:] and not own.startswith(data[place:]):
                raise InvalidRequestError("the logprobs of the answer do not belong to its text")
            own, found = data[place:], place  # a stop string cut the rest
        placed += [_Token(place, found, one) for one in unknown]
        placed.append(_Token(found, found + len(own), logprob))
        unknown, place = [], found + len(own)
    return placed + [_Token(place, len(data), one) for one in unknown]


Probability = Callable[[int, int], float]


def _value(text: str, start: int, probability: Probability) -> tuple[Any, int]:
    """A value's confidences and end. Raises ValueError or IndexError without a value."""
    start = _after_space(text, start)
    if text[start] == '"':
        _, end = _DECODER.raw_decode(text, start)
        return probability(start + 1, end), end
    if text[start] == "{":
        fields: dict[str, Any] = {}
        for place in (members := _Members(text, start, "}")):
            name, end = _DECODER.raw_decode(text, _expect(text, place, '"') - 1)
            fields[name], members.end = _value(text, _expect(text, _after_space(text, end), ":"), probability)
        return fields, members.end
    if text[start] == "[":
        items: list[Any] = []
        for place in (members := _Members(text, start, "]")):
            item, members.end = _value(text, place, probability)
            items.append(item)
        return items, members.end
    if (plain := _PLAIN.match(text, start)) is None:
        raise ValueError(f"there is no value at character {start}")
    return probability(start, plain.end()), plain.end()


class _Members:
    """Places of an object's or array's members. end: the last member's, finally the whole's."""

    def __init__(self, text: str, start: int, bracket: str) -> None:
        self._text, self._bracket, self.end = text, bracket, start + 1

    def __iter__(self) -> Iterator[int]:
        place = _after_space(self._text, self.end)
        if self._text[place] == self._bracket:
            self.end = place + 1
            return
        while True:
            yield place
            place = _after_space(self._text, self.end)
            if self._text[place] == self._bracket:
                self.end = place + 1
                return
            place = _after_space(self._text, _expect(self._text, place, ","))


def _expect(text: str, place: int, character: str) -> int:
    if text[place] != character:
        raise ValueError(f"{character} is missing at character {place}")
    return place + 1


def _after_space(text: str, place: int) -> int:
    match = _SPACE.match(text, place)
    assert match is not None
    return match.end()
