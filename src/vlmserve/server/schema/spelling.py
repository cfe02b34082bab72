"""Finds the known name that a misspelt one means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_LONGEST_NAME = 40
"""Maximum characters of a name to check."""
_EDITS = ((8, 2), (5, 1))
"""Minimum letters of a name, and the wrong letters to detect. Shorter names often differ in one letter on purpose."""
_PREFIXES, _SUFFIXES = ("min", "max"), ("id", "ids")
"""Prefixes and suffixes of different known names, like min_tokens and conversation_id."""


class _Known(NamedTuple):
    letters: str
    kinds: int
    """The set of letters, as bits."""
    meant: str


class Spellings:
    """Known names, and names that other servers use for them. Case, ``_`` and ``-`` do not matter."""

    def __init__(self, meanings: Mapping[str, str]) -> None:
        """`meanings`: what to suggest for each name."""
        self._exact = {_letters(name): meant for name, meant in meanings.items()}
        self._known = [_Known(letters, _kinds(letters), meant) for letters, meant in self._exact.items()]

    def meant(self, name: str) -> str | None:
        """None: no name is near enough."""
        if len(name) > _LONGEST_NAME:
            return None
        letters = _letters(name)
        if letters in self._exact:
            return self._exact[letters]
        best = next((edits for least, edits in _EDITS if len(letters) >= least), 0)
        kinds = _kinds(letters)
        meant = None
        for known in self._known if best else ():
            # An edit changes the length by at most one, and the set of letters by at most two.
            if abs(len(known.letters) - len(letters)) > best or (known.kinds ^ kinds).bit_count() > 2 * best:
                continue
            if _differ_on_purpose(known.letters, letters):
                continue
            edits = distance(letters, known.letters, best)
            if edits < best or (edits == best and meant is None):
                best, meant = edits, known.meant
        return meant


def _letters(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def _kinds(letters: str) -> int:
    bits = 0
    for letter in letters:
        bits |= 1 << (ord(letter) & 63)
    return bits


def _differ_on_purpose(one: str, other: str) -> bool:
    prefixes = {one[:3], other[:3]}
    return prefixes == set(_PREFIXES) or one.endswith(_SUFFIXES) != other.endswith(_SUFFIXES)


def distance(one: str, other: str, most: int) -> int:
    """Count inserted, deleted, replaced and swapped letters (optimal string alignment), up to `most` + 1.

    Only cells within `most` of the diagonal are computed.
    """
    far = most + 1
    before: list[int] = []
    last = list(range(len(other) + 1))
    for row, letter in enumerate(one, 1):
        first, end = max(1, row - most), min(len(other), row + most)
        line = [far] * (len(other) + 1)
        line[0] = row
        for column in range(first, end + 1):
            cost = min(last[column] + 1, line[column - 1] + 1, last[column - 1] + (letter != other[column - 1]))
            if row > 1 and column > 1 and one[row - 2] == other[column - 1] and letter == other[column - 2]:
                cost = min(cost, before[column - 2] + 1)
            line[column] = cost
        if min(line[first - 1 : end + 1]) > most:
            return far
        before, last = last, line
    return min(last[-1], far)
