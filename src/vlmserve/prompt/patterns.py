"""Bounds the work of a tokenizer's pattern, which the tokenizers library matches by backtracking (Oniguruma)."""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_PATTERN = 10_000
"""Maximum characters of a pattern."""
_MAX_CHOICES = 1000
"""Maximum ways through the bounded parts of one alternative."""
_MAX_SIZE = 10_000
"""Maximum characters of a pattern, with bounded repeats written out."""
_MAX_DEPTH = 20
"""Maximum depth of nested groups and classes."""

_ESCAPE = re.compile(
    r"\\(?:[pP]\{[^{}]*\}|x\{[\da-fA-F ]*\}|x[\da-fA-F]{1,2}|u[\da-fA-F]{4}|c.|[^1-9gkKXyY])", re.DOTALL
)
"""An escape of one character or an anchor; no backreferences, group calls or text segments."""
_ANCHORS = frozenset({"^", "$", r"\b", r"\B", r"\A", r"\z", r"\Z", r"\G"})
_GROUP = re.compile(r"\((?:\?(?P<look><?[=!])|\?>|\?<[A-Za-z_]\w*>|\?[im-]*:|\?(?P<options>[im-]+)\)|(?!\?))")
_BOUNDS = re.compile(r"\{(?:(\d{1,6})(,?)(\d{1,6})?|,(\d{1,6}))\}")


class PatternError(ValueError):
    """A pattern without a small bound of work. The message is a clause about the pattern."""


class _Part(NamedTuple):
    """For a text of length ``n``, the part ends in ``choices * n**paths`` ways, found in ``n**degree`` steps."""

    paths: int = 0
    degree: int = 0
    choices: int = 1
    size: int = 1
    may_be_empty: bool = False
    """It matches at any position."""
    consumes: bool = True
    """It matches no empty text."""


_ANCHOR = _Part(size=0, consumes=False)


def check_pattern(pattern: str) -> bool:
    """Return whether each match has at least one character.

    Raises PatternError if a failing match may take more than linear time at one position, so a text more than quadratic
    time, or for unknown syntax. Patterns of published tokenizers pass.
    """
    if len(pattern) > MAX_PATTERN:
        raise PatternError(f"has {len(pattern):,} characters (at most {MAX_PATTERN:,})")
    parser = _Parser(pattern)
    part = parser.alternatives(0)
    if parser.at < len(pattern):
        raise PatternError("has a ) without a (")
    return part.consumes


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def alternatives(self, depth: int) -> _Part:
        if depth > _MAX_DEPTH:
            raise PatternError(f"nests groups more than {_MAX_DEPTH} deep")
        start = self.at
        parts = [self._sequence(depth)]
        while self.text.startswith("|", self.at):
            self.at += 1
            parts.append(self._sequence(depth))
        letters = self.text[start : self.at].casefold().split("|")
        is_class = all(map(str.isalnum, letters)) and len("".join(letters)) == len(set(letters)) == len(parts)
        return _Part(
            paths=max(part.paths for part in parts),
            degree=max(part.degree for part in parts),
            choices=1 if is_class else sum(part.choices for part in parts),
            size=sum(part.size for part in parts),
            may_be_empty=any(part.may_be_empty for part in parts),
            consumes=all(part.consumes for part in parts),
        )

    def _sequence(self, depth: int) -> _Part:
        paths = degree = skipped = size = 0
        choices, may_be_empty, consumes = 1, True, False
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            part = self._repeated(depth)
            # A part that may be empty never makes the sequence fail. If a later part fails, all ways to it are tried.
            skipped = max(skipped, part.degree)
            degree = max(degree, skipped)
            if not part.may_be_empty:
                degree = max(degree, paths + skipped)
                if degree > 1 or choices > _MAX_CHOICES:
                    raise PatternError("may take very long: one repeat follows or contains another")
            paths += part.paths
            choices = min(choices * part.choices, _MAX_CHOICES + 1)
            size += part.size
            may_be_empty = may_be_empty and part.may_be_empty
            consumes = consumes or part.consumes
        if size > _MAX_SIZE:
            raise PatternError(f"repeats more than {_MAX_SIZE:,} characters")
        return _Part(paths, degree, choices, size, may_be_empty, consumes)

    def _repeated(self, depth: int) -> _Part:
        part = self._atom(depth)
        while (bounds := self._bounds()) is not None:
            part = _repeat(part, *bounds)
        return part

    def _bounds(self) -> tuple[int, int | None] | None:
        """Return minimum and maximum (None: unlimited) of the repeat at this place, if any."""
        sign = self.text[self.at : self.at + 1]
        if sign and sign in "*+?":
            self.at += 1
            if self.text[self.at : self.at + 1] in ("?", "+"):  # lazy, possessive
                self.at += 1
            return int(sign == "+"), 1 if sign == "?" else None
        found = _BOUNDS.match(self.text, self.at)
        if found is None:
            return None
        self.at = found.end()
        low, comma, high, only_high = found.groups()
        if only_high is not None:
            return 0, int(only_high)
        if high is not None and not comma:
            raise PatternError("has a repeat that cannot be read")
        return int(low), int(high) if high is not None else None if comma else int(low)

    def _atom(self, depth: int) -> _Part:
        char = self.text[self.at]
        if char == "[":
            self._class(depth)
            return _Part()
        if char == "(":
            return self._group(depth)
        if char == "\\":
            return _ANCHOR if self._escape() in _ANCHORS else _Part()
        if char in "*+?":
            raise PatternError("has a repeat of nothing")
        self.at += 1
        return _ANCHOR if char in _ANCHORS else _Part()

    def _group(self, depth: int) -> _Part:
        found = _GROUP.match(self.text, self.at)
        if found is None:
            raise PatternError("has a group of an unknown kind")
        self.at = found.end()
        part = self.alternatives(depth + 1)
        if found["options"] is not None:  # options apply to the rest of the group, including alternatives
            return part
        if not self.text.startswith(")", self.at):
            raise PatternError("has a ( without a )")
        self.at += 1
        if found["look"] is None:
            return part
        if "<" in found["look"] and part.paths:
            raise PatternError("looks behind for a text of any length")
        return _Part(degree=max(part.degree, part.paths), size=part.size, consumes=False)

    def _escape(self) -> str:
        found = _ESCAPE.match(self.text, self.at)
        if found is None:
            raise PatternError(f"has {self.text[self.at : self.at + 2]}, which is not supported")
        self.at = found.end()
        return found[0]

    def _class(self, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise PatternError(f"nests classes more than {_MAX_DEPTH} deep")
        self.at += 1
        if self.text.startswith("^", self.at):
            self.at += 1
        if self.text.startswith("]", self.at):
            self.at += 1
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "]":
                self.at += 1
                return
            if char == "[":
                self._class(depth + 1)
            elif char == "\\":
                self._escape()
            else:
                self.at += 1
        raise PatternError("has a [ without a ]")


def _repeat(part: _Part, low: int, high: int | None) -> _Part:
    if high is not None:
        low, high = sorted((low, high))
    most = low if high is None else high
    size = part.size * max(most, 1)
    if size > _MAX_SIZE:
        raise PatternError(f"repeats more than {_MAX_SIZE:,} characters")
    varies = part.paths > 0 or part.choices > 1 or part.may_be_empty
    part = part._replace(may_be_empty=low == 0 or part.may_be_empty, consumes=low > 0 and part.consumes)
    if (low, high) in ((0, 1), (1, 1)):
        return part._replace(choices=part.choices + (low == 0))
    ways = part.choices**most * (most - low + 1) if part.choices == 1 or most <= 10 else _MAX_CHOICES + 1
    if high is not None and part.paths == 0 and ways <= _MAX_CHOICES:
        return part._replace(choices=ways, size=size)
    # If each repetition matches in several ways, a text divides in exponentially many ways.
    degree = part.degree + (1 if part.degree else 0)
    return part._replace(paths=2 if varies else 1, degree=degree, choices=1, size=size)
