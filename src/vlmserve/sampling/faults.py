"""Explains faults of grammars to their authors."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from vlmserve.sampling.schemas import read_schema
from vlmserve.types import Grammar

_MAX_MESSAGE = 600
"""Characters of llguidance's message that an error repeats."""
_MAX_SHOWN = 40
"""Characters of a pattern, or of its path, in an error."""
_PATTERN = re.compile(r"regex parse error:\n {4}(?P<pattern>.*)\n[ ^]+\nerror: (?P<reason>.*)")
_ADVICE = {
    "look-around": ("look-around is not supported", "write it without (?=, (?!, (?<= and (?<!"),
    "backreferences": ("backreferences are not supported", r"repeat the group in place of \1"),
}
_LIMITS = ("Current row has", "initial lexer configuration", "lexer precomputation failed", "lexer error: too many")
"""Messages of llguidance about its limits. They name settings that clients do not have."""
_TOO_COMPLEX = "it is too complex to compile; use fewer optional properties, alternatives or counted repetitions"


def shortened(message: str) -> str:
    message = message.replace("<non-verbose/>", "").strip()
    return message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}…"


def fault_of(grammar: Grammar, message: str) -> str:
    found = _PATTERN.search(message)
    if found is not None and grammar.kind in ("json_schema", "regex"):
        pattern, reason = found["pattern"], found["reason"]
        default = (reason, "correct the expression")
        fault, advice = next((words for start, words in _ADVICE.items() if reason.startswith(start)), default)
        where = f"{_cut(path_of(grammar.text, pattern))} " if grammar.kind == "json_schema" else ""
        return f"{where}{_cut(pattern)!r}: {fault}; {advice}"
    return _TOO_COMPLEX if any(words in message for words in _LIMITS) else shortened(message)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def path_of(text: str, pattern: str) -> str:
    """Return a path such as ``properties.name.pattern``."""
    places: list[_Place] = [_Place(read_schema(text))]
    while places:
        place = places.pop()
        node = place.node
        if isinstance(node, dict):
            if node.get("pattern") == pattern:
                return ".".join([*place.names(), "pattern"])
            if isinstance(patterns := node.get("patternProperties"), dict) and pattern in patterns:
                return ".".join([*place.names(), "patternProperties"])
        inner = enumerate(node) if isinstance(node, list) else node.items() if isinstance(node, dict) else ()
        places += [_Place(one, str(name), place) for name, one in inner]
    return "pattern"


class _Place(NamedTuple):
    """Linked to its parent, because paths of long names take much memory."""

    node: Any
    name: str = ""
    outer: _Place | None = None

    def names(self) -> list[str]:
        names, place = [], self
        while place.outer is not None:
            names.append(place.name)
            place = place.outer
        return names[::-1]
