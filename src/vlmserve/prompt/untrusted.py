"""Keeps users' text apart from control tokens of chat templates."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from vlmserve.cancellation import check_cancelled

_OPEN, _CLOSE = "\U000ffff0", "\U000ffff1"
END_MARK = _OPEN + _CLOSE
"""An empty code, which no quoted text contains. It marks a position in a template's text."""
_CODE = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")
_WINDOW = 16384
"""Characters of one search, which holds the GIL."""


def find_all(pattern: re.Pattern[str], text: str, longest: int) -> Iterator[re.Match[str]]:
    """Yield the matches of ``pattern.finditer``, searching in windows. longest: maximum characters of a match.

    Raises CancelledWorkError.
    """
    done = 0
    for start in range(0, len(text), _WINDOW):
        check_cancelled()
        end = start + _WINDOW
        # one extra character for look-ahead
        for match in pattern.finditer(text, max(start, done), end + longest + 1):
            if match.start() >= end:
                break
            done = match.end()
            yield match


class ControlTokens:
    def __init__(self, tokens: Iterable[str]) -> None:
        self.tokens = frozenset(token for token in tokens if token)
        longest_first = sorted(self.tokens, key=len, reverse=True)
        self._dangerous = re.compile("|".join(map(re.escape, [*longest_first, _OPEN, _CLOSE])))
        self._heads = frozenset(token[:end] for token in self.tokens for end in range(1, len(token)))
        self._tails = frozenset(token[start:] for token in self.tokens for start in range(1, len(token)))
        self._longest = max(map(len, self.tokens), default=0)

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return parts that are a control token, or could become one next to other text."""
        if not text:
            return []
        spans = [match.span() for match in find_all(self._dangerous, text, max(self._longest, 1))]
        # Templates may strip the text, so check the stripped edges too.
        left, right = len(text) - len(text.lstrip()), len(text.rstrip())
        for start in {0, left}:
            spans += self._edge(text, start, None)
        for end in {len(text), right}:
            spans += self._edge(text, None, end)
        return _merged(spans)

    def _edge(self, text: str, start: int | None, end: int | None) -> list[tuple[int, int]]:
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if start is not None and text[start : start + length] in self._tails:
                return [(start, start + length)]
            if end is not None and end >= length and text[end - length : end] in self._heads:
                return [(end - length, end)]
        return self._inside(text)

    def _inside(self, text: str) -> list[tuple[int, int]]:
        # A short text may be the middle of a token that the texts around it complete.
        stripped = text.strip()
        if stripped and len(stripped) < self._longest and any(stripped in token for token in self.tokens):
            start = text.index(stripped)
            return [(start, start + len(stripped))]
        return []


class Quotation:
    """A user who types ``<image>`` means these characters, not the token.

    Before rendering, `quote` replaces text that could be read as a control token by private-use characters. Afterwards,
    `unquote` restores it, to be tokenized without control tokens.
    """

    def __init__(self, control: ControlTokens) -> None:
        self._control = control
        self._quoted: list[str] = []

    @property
    def is_empty(self) -> bool:
        return not self._quoted

    def quote(self, text: str) -> str:
        """Replace parts that could be read as a control token by codes."""
        pieces: list[str] = []
        done = 0
        for start, end in self._control.spans(text):
            pieces += [text[done:start], f"{_OPEN}{len(self._quoted)}{_CLOSE}"]
            self._quoted.append(text[start:end])
            done = end
        return "".join([*pieces, text[done:]])

    def unquote(self, text: str) -> str:
        return _CODE.sub(lambda match: self._quoted[int(match[1])], text)

    def quoted_spans(self, text: str) -> list[tuple[int, int]]:
        """The positions of quoted characters in ``unquote(text)``."""
        spans, shift = [], 0
        for match in _CODE.finditer(text):
            length = len(self._quoted[int(match[1])])
            spans.append((match.start() + shift, match.start() + shift + length))
            shift += length - len(match[0])
        return spans


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
