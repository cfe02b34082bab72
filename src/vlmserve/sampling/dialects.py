"""Translates clients' JSON schemas to schemas that llguidance accepts."""

from __future__ import annotations

import functools
import itertools
import json
import re
from typing import Any
from urllib.parse import quote

_DRAFTS = {
    "draft-04": "http://json-schema.org/draft-04/schema#",
    "draft-06": "http://json-schema.org/draft-06/schema#",
    "draft-07": "http://json-schema.org/draft-07/schema#",
    "2019-09": "https://json-schema.org/draft/2019-09/schema",
    "2020-12": "https://json-schema.org/draft/2020-12/schema",
}
_VALUES = frozenset({"const", "enum", "default", "examples", "example"})
"""Keywords whose values are not schemas."""
_NAMES = frozenset({"properties", "$defs", "definitions", "patternProperties", "dependentSchemas"})
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
_LEAST_NUMBERS = frozenset({"minimum", "exclusiveMinimum"})
NUMBER_BOUNDS = (*sorted(_LEAST_NUMBERS), "maximum", "exclusiveMaximum")
_COMBINING = frozenset({"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"})
_IGNORED = frozenset(
    {"not", "contains", "if", "dependentRequired", "dependentSchemas", "propertyNames", "unevaluatedProperties"}
    | {"unevaluatedItems", "uniqueItems"}
)
"""Keywords that llguidance does not enforce."""
_CLASS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]", re.DOTALL)
"""An escaped character, or a character class of ECMA-262."""
_LONGEST_PATTERN = 1000
"""Maximum characters of a pattern whose classes are translated, because `_CLASS` takes quadratic time."""
_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
_UNREADABLE = re.compile(r"\(\?<?[=!]|\\[1-9]|\\k<")
"""Look-around and backreferences, which no automaton can match."""
_MAX_COMPARED = 32
"""Schemas to compare in pairs."""
_LONGEST_CHECKED = 16_384
"""Maximum characters of a pattern that llguidance parses as a test, in up to 0.1 s."""
_KEPT_PATTERNS = 1024
_SLOW_PATTERN = re.compile(r"(\\[pP].*){8}|\(\?[a-zA-Z]*i", re.DOTALL)
"""Eight Unicode classes or the flag ``i``, which take long to parse."""
_FRAGMENT = "#/~%!$&'()*+,;=:@?-._"
"""Characters allowed in a reference within a document."""


def _escape_brackets(found: re.Match[str]) -> str:
    """llguidance reads brackets in a class as a nested class."""
    text = found[0]
    return (
        text
        if text[0] == "\\" or "[:" in text
        else "[" + re.sub(r"(\\.)|\[", lambda m: m[1] or r"\[", text[1:], flags=re.DOTALL)
    )


def readable(schema: Any, largest: int, *, strict: bool) -> tuple[Any, set[str]]:
    """Returns also the keywords that answers need not obey.

    largest: maximum magnitude of unbounded numbers; 0: unlimited. strict: keep keywords that llguidance rejects.
    """
    relaxed: set[str] = set()
    return _Reader(largest, strict, relaxed).read(schema), relaxed


class _Reader:
    def __init__(self, largest: int, strict: bool, relaxed: set[str]) -> None:
        self._largest = largest
        self._strict = strict
        self._relaxed = relaxed

    def read(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self.read(one) for one in schema]
        if not isinstance(schema, dict):
            return schema
        read: dict[str, Any] = {}
        outer = self._outer_bounds(schema)
        for name, value in schema.items():
            if name in outer:
                continue
            if name in _VALUES:
                read[name] = value
            elif value is None:
                continue  # generators write null for an unset keyword
            elif name in _NAMES and isinstance(value, dict):
                read[name] = {key: self.read(one) for key, one in value.items()}
            else:
                self._keyword(read, name, value)
        self._properties(read)
        return read

    def _keyword(self, read: dict[str, Any], name: str, value: Any) -> None:
        if not self._strict and name in _IGNORED and value is not False:
            self._relaxed.add(name)
        if name == "$schema" and isinstance(value, str):
            draft = next((uri for part, uri in _DRAFTS.items() if part in value), None)
            if draft is not None:
                read[name] = draft
        elif name == "$ref" and isinstance(value, str) and value.startswith("#"):
            read[name] = quote(value, safe=_FRAGMENT)
        elif name == "type" and value == "any":
            return
        elif name == "oneOf" and isinstance(value, list):
            if not self._strict and not _are_disjoint(value):
                self._relaxed.add(name)
            read[name] = self.read(value)
        elif name in _COUNTS and isinstance(value, float) and value.is_integer():
            read[name] = int(value)
        elif name == "pattern" and isinstance(value, str):
            self._pattern(read, value)
        elif name == "format" and not self._strict and value not in _FORMATS:
            self._relaxed.add(name)
        else:
            read[name] = self.read(value)

    def _pattern(self, read: dict[str, Any], pattern: str) -> None:
        pattern = pattern.replace("[^]", r"[\s\S]")
        pattern = re.sub(r"\\c([A-Za-z])", lambda match: rf"\x{ord(match[1]) % 32:02x}", pattern)
        if len(pattern) <= _LONGEST_PATTERN:
            pattern = _CLASS.sub(_escape_brackets, pattern)
        if self._strict or _is_readable(pattern):
            read["pattern"] = pattern
        else:
            self._relaxed.add("pattern")

    def _outer_bounds(self, schema: dict[str, Any]) -> set[str]:
        """Return number bounds beyond the server's limit, unless no number within it is allowed."""
        numbers = {name: value for name in NUMBER_BOUNDS if isinstance(value := schema.get(name), int | float)}
        largest = self._largest
        below = {name for name, value in numbers.items() if value <= -largest}
        above = {name for name, value in numbers.items() if value >= largest}
        if not largest or above & _LEAST_NUMBERS or below - _LEAST_NUMBERS:
            return set()
        return below | above

    def _properties(self, read: dict[str, Any]) -> None:
        is_single = not any(name in read for name in _COMBINING)
        if is_single and read.get("unevaluatedProperties") is False and "additionalProperties" not in read:
            del read["unevaluatedProperties"]
            read["additionalProperties"] = False
        elif not self._strict and read.get("unevaluatedProperties") is False:
            self._relaxed.add("unevaluatedProperties")
        properties, required = read.get("properties"), read.get("required")
        if not (is_single and isinstance(properties, dict) and isinstance(required, list)):
            return
        missing = [name for name in required if isinstance(name, str) and name not in properties]
        if not missing or "patternProperties" in read:
            return
        others = read.get("additionalProperties", True)
        if others is not False:
            read["properties"] = {**properties, **dict.fromkeys(missing, others)}
        elif not self._strict:
            self._relaxed.add("required")
            read["required"] = [name for name in required if name not in missing]


@functools.lru_cache(_KEPT_PATTERNS)
def _is_readable(pattern: str) -> bool:
    """Guess for long and slow patterns."""
    from llguidance import LLMatcher

    if len(pattern) > _LONGEST_CHECKED or _SLOW_PATTERN.search(pattern):
        return not (_UNREADABLE.search(pattern.replace(r"\\", "")) or _is_unclosed(pattern))
    schema = {"type": "string", "pattern": pattern}
    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))


def _is_unclosed(pattern: str) -> bool:
    """Return whether groups, classes or escapes are unbalanced."""
    depth, in_class, is_escaped = 0, False, False
    for character in pattern:
        if is_escaped or character == "\\":
            is_escaped = not is_escaped
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character in "()":
            depth += 1 if character == "(" else -1
            if depth < 0:
                return True
    return depth > 0 or in_class or is_escaped


def _are_disjoint(schemas: list[Any]) -> bool:
    """Compare types, constants and required properties to see whether no value fits two schemas."""
    if len(schemas) > _MAX_COMPARED:
        return False
    return all(_differ(one, other) for one, other in itertools.combinations(schemas, 2))


def _differ(one: Any, other: Any) -> bool:
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return False
    values, others = _constants(one), _constants(other)
    if values is not None and others is not None:
        return values.isdisjoint(others)
    kinds, other_kinds = _kinds(one), _kinds(other)
    if kinds and other_kinds and kinds.isdisjoint(other_kinds):
        return True
    if not kinds == other_kinds == {"object"}:
        return False
    properties, other_properties = one.get("properties"), other.get("properties")
    if not (isinstance(properties, dict) and isinstance(other_properties, dict)):
        return False
    required = _required(one) & _required(other)
    return contradict(*({name: own[name] for name in own.keys() & required} for own in (properties, other_properties)))


def contradict(properties: dict[str, Any], others: dict[str, Any]) -> bool:
    """True if no value fits both schemas of a shared property."""
    return any(_differ(properties[name], others[name]) for name in properties.keys() & others.keys())


def _constants(schema: dict[str, Any]) -> set[str] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return {json.dumps(value, sort_keys=True) for value in values} if isinstance(values, list) else None


def _kinds(schema: dict[str, Any]) -> set[str]:
    kinds = schema.get("type")
    named = {kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)}
    return named | {"integer"} if "number" in named else named


def _required(schema: dict[str, Any]) -> set[str]:
    names = schema.get("required")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()
