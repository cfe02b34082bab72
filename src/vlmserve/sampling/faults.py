"""Explain the faults of grammars to their authors."""

from __future__ import annotations

import re
from typing import Any

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


def shortened(message: str) -> str:
    """Return a message of llguidance without its marks."""
    message = message.replace("<non-verbose/>", "").strip()
    return message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}…"


def fault_of(grammar: Grammar, message: str) -> str:
    """Return llguidance's message about a grammar, or one sentence about a broken regular expression."""
    found = _PATTERN.search(message)
    if found is not None and grammar.kind in ("json_schema", "regex"):
        pattern, reason = found["pattern"], found["reason"]
        default = (reason, "correct the expression")
        fault, advice = next((words for start, words in _ADVICE.items() if reason.startswith(start)), default)
        where = f"{_cut(_path(grammar.text, pattern))} " if grammar.kind == "json_schema" else ""
        return f"{where}{_cut(pattern)!r}: {fault}; {advice}"
    return shortened(message)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def _path(text: str, pattern: str) -> str:
    """Return the place of a pattern in a schema, as ``properties.name.pattern``."""
    nodes: list[tuple[Any, str]] = [(read_schema(text), "")]
    while nodes:
        node, path = nodes.pop()
        if isinstance(node, dict):
            if node.get("pattern") == pattern:
                return f"{path}pattern"
            if isinstance(patterns := node.get("patternProperties"), dict) and pattern in patterns:
                return f"{path}patternProperties"
        inner = enumerate(node) if isinstance(node, list) else node.items() if isinstance(node, dict) else ()
        nodes += [(one, f"{path}{name}.") for name, one in inner]
    return "pattern"
