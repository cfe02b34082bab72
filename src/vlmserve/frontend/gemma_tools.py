"""Gemma 4's tool calls: objects with bare keys, and strings between special tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from urllib.parse import unquote

from vlmserve.errors import InvalidRequestError
from vlmserve.frontend.tools import ArgumentsReader, Function, ToolForm, guided, literal, overlap
from vlmserve.sampling.dialects import NUMBER_BOUNDS

_QUOTE = '<|"|>'
_WORD = re.compile(r"[^,\[\]{}<\s]+")
_NO_KEY = re.compile(r'[{}\[\]:,<>"\n]|^\s|\s$|^$')
_SCALARS = ("integer", "number", "boolean")
_JSON_WORDS = {"None": "null", "True": "true", "False": "false"}


@dataclass(frozen=True)
class GemmaToolForm(ToolForm):
    """Writes calls as ``call:NAME{key:value}``, with arguments in the schema's order. Strings are not escaped.

    The grammar follows a schema's types, properties, items, alternatives, references and number bounds.
    """

    call_start: ClassVar[str] = "call:"
    marks: ClassVar[tuple[str, ...]] = (_QUOTE,)

    def head(self, function: Function) -> str:
        return f"call:{function.name}{{"

    def written(self, name: str, arguments: dict[str, Any]) -> str:
        return self.wrapped(f"call:{name}{_written(arguments)}")

    @property
    def example(self) -> str:
        return f"call:NAME{{ARGUMENT:NUMBER,ARGUMENT:{_QUOTE}TEXT{_QUOTE}}}"

    def reader(self, function: Function) -> ArgumentsReader:
        return GemmaArguments()

    def call_rules(self, name: str, function: Function) -> list[str]:
        schema = guided(function.schema, function.strict, "tools", replace(self.bounds, length=0))
        rules = _Rules(name, function.name, schema, self._around(_QUOTE), self.special_ids.get(_QUOTE))
        try:
            rules.add(name, f"{literal(self.head(function))} {rules.members(schema)} {literal('}')}")
        except RecursionError:
            raise InvalidRequestError("tools: the schema is nested too deeply", param="tools") from None
        return rules.lines


class GemmaArguments:
    """Reads a call's arguments as JSON, after their opening brace. Streams long strings."""

    def __init__(self) -> None:
        self._held = ""
        self._open = ["{"]
        """Unclosed brackets."""
        self._begun = self._in_string = False
        self._wants_key = True

    def push(self, text: str) -> tuple[str, str | None]:
        self._held += text
        written = "" if self._begun or not self._held else "{"
        self._begun = self._begun or bool(written)
        while self._open:
            before = len(self._held)
            written += self._string() if self._in_string else self._next()
            if len(self._held) == before:
                return written, None
        return written, self._held

    def _string(self) -> str:
        place = self._held.find(_QUOTE)
        end = place if place >= 0 else len(self._held) - overlap(self._held, _QUOTE)
        text, self._held = self._held[:end], self._held[end:]
        if place >= 0:
            self._held, self._in_string = self._held.removeprefix(_QUOTE), False
        return json.dumps(text, ensure_ascii=False)[1:-1] + ('"' if place >= 0 else "")

    def _next(self) -> str:
        """The next piece outside strings; empty if more text is needed."""
        held = self._held
        if held.startswith(_QUOTE):
            self._held, self._in_string = held.removeprefix(_QUOTE), True
            return '"'
        if not held or _QUOTE.startswith(held):
            return ""
        first = held[0]
        if first in "{}[],:" or first.isspace():
            self._held = held[1:]
            return self._mark(first)
        if self._wants_key:
            key, end, rest = held.partition(":")
            if not end:
                return ""
            self._held, self._wants_key = rest, False
            return f"{json.dumps(key.strip(), ensure_ascii=False)}: "
        match = _WORD.match(held)
        if match is None:  # the grammar allows no such text
            self._held = held[1:]
            return ""
        if match.end() == len(held):
            return ""
        self._held = held[match.end() :]
        return _scalar(match[0])

    def _mark(self, mark: str) -> str:
        if mark in "{[":
            self._open.append(mark)
        elif mark in "}]":
            self._open.pop()
        if mark in "{[,}]":
            self._wants_key = mark in "{," and self._open[-1:] == ["{"]
        elif mark == ":":  # after a quoted key
            self._wants_key = False
        return {",": ", ", ":": ": "}.get(mark, mark.strip())


class _Rules:
    """The grammar rules of one call.

    schema: of the arguments, as `guided` returns it. quote: the string mark in Lark. token: the mark's token id.
    """

    def __init__(self, name: str, function: str, schema: Mapping[str, Any], quote: str, token: int | None) -> None:
        self.lines: list[str] = []
        self._name, self._function, self._schema = name, function, schema
        self._quote, self._token = quote, token
        self._count = 0
        self._names: dict[str, str] = {}
        """Rules that several values share, by their content."""

    def add(self, name: str, body: str) -> str:
        self.lines.append(f"{name}: {body}")
        return name

    def members(self, schema: Mapping[str, Any]) -> str:
        """Return the rule for the members between an object's braces."""
        if "properties" not in schema and isinstance(reference := schema.get("$ref"), str):
            schema = found if isinstance(found := self._referred(reference), dict) else schema
        properties = schema.get("properties")
        more = schema.get("additionalProperties", True)
        if not isinstance(properties, dict) or not properties:
            return "" if more is False else _listed(f'{self._key()} ":" {self.value(more)}')
        required = schema.get("required") or []
        if not isinstance(required, list):
            raise self._unusable("required", required, "a list of names")
        # `first` matches what remains before any member is written, `other` what remains after one.
        first = other = ""
        for key, value in reversed(properties.items()):
            if _NO_KEY.search(key):
                raise InvalidRequestError(
                    f"tools: the model's form of calls has no way to write the parameter {key!r:.100} of "
                    f"{self._function}; rename it",
                    param="tools",
                )
            member = f"{literal(key + ':')} {self.value(value)}"
            begun = self.add(self._new(), f"{member} {other}")
            if key in required:
                first = begun
            elif first:
                first = self.add(self._new(), f"{begun} | {first}")
            else:
                first = f"{begun}?"
            after = f'"," {begun}'
            other = self.add(
                self._new(), after if key in required else f"{after} | {other}" if other else f"({after})?"
            )
        return first

    def value(self, schema: Any) -> str:
        if not isinstance(schema, dict):
            return self._anything()
        if isinstance(reference := schema.get("$ref"), str):
            return self._shared(f"reference {reference}", lambda: self.value(self._referred(reference)))
        if "const" in schema or isinstance(schema.get("enum"), list):
            choices = [schema["const"]] if "const" in schema else schema["enum"]
            if not choices:
                raise self._unusable("enum", choices, "a list of values")
            return _any_of([self._choice(choice) for choice in choices])
        if isinstance(parts := schema.get("allOf"), list) and len(parts) == 1 and isinstance(parts[0], dict):
            return self.value({**{name: kept for name, kept in schema.items() if name != "allOf"}, **parts[0]})
        for name in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(name), list) and options:
                return _any_of([self.value(option) for option in options])
        kinds = schema.get("type")
        if isinstance(kinds, list):
            # Repeated types of nested schemas would double the rules at each level.
            kinds = dict.fromkeys(kind for kind in kinds if isinstance(kind, str))
            return _any_of([self.value({**schema, "type": kind}) for kind in kinds]) if kinds else self._anything()
        if kinds == "object" or (kinds is None and "properties" in schema):
            return self.add(self._new(), f'"{{" {self.members(schema)} "}}"')
        if kinds == "array" or (kinds is None and "items" in schema):
            return self.add(self._new(), f'"[" {self._items(schema)} "]"')
        if kinds == "string":
            return self._string()
        if kinds in _SCALARS:
            number = {name: schema[name] for name in ("type", "multipleOf", *NUMBER_BOUNDS) if name in schema}
            return self.add(self._new(), f"%json {json.dumps(number)}")
        return '("null" | "None")' if kinds == "null" else self._anything()

    def _items(self, schema: Mapping[str, Any]) -> str:
        item = self.value(schema.get("items", True))
        least, most = self._count_of(schema, "minItems") or 0, self._count_of(schema, "maxItems")
        if most is not None and most < least:
            raise self._unusable("maxItems", most, f"at least minItems, {least}")
        if most == 0:
            return ""
        if not least and most is None:
            return _listed(item)
        again = "" if most == 1 else f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f"{item} {again}" if least else f"({item} {again})?"

    def _count_of(self, schema: Mapping[str, Any], name: str) -> int | None:
        count = schema.get(name)
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 0):
            raise self._unusable(name, count, "a whole number, at least 0")
        return count

    def _unusable(self, name: str, value: Any, wanted: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"tools: {name} in a schema of {self._function} has to be {wanted}, not {value!r:.50}", param="tools"
        )

    def _choice(self, choice: Any) -> str:
        text = " ".join(
            self._quote if part == _QUOTE else literal(part)
            for part in re.split(f"({re.escape(_QUOTE)})", _written(choice))
            if part
        )
        return f'({text} | "None")' if choice is None else text

    def _string(self) -> str:
        def body() -> str:
            lazy = self._new()
            self.lines.append(f"{lazy}[lazy]: TEXT {literal(_QUOTE)}")
            # A special token ends the text before it, so text need not be lazy.
            return f"{self._quote} ({lazy}{'' if self._token is None else f' | TEXT <[{self._token}]>'})"

        return self._shared("string", body)

    def _key(self) -> str:
        return self._shared("key", lambda: r'/[^{}\[\]:,<>"\n ]+/')

    def _anything(self) -> str:
        def body() -> str:
            again = self._names["anything"]
            scalar = '%json {"type": ["number", "boolean"]}'
            plain = self.add(self._new(), scalar)
            array = self.add(self._new(), f'"[" {_listed(again)} "]"')
            member = f'{self._key()} ":" {again}'
            mapping = self.add(self._new(), f'"{{" {_listed(member)} "}}"')
            return f'{self._string()} | {plain} | {array} | {mapping} | "null" | "None"'

        return self._shared("anything", body)

    def _shared(self, kind: str, body: Callable[[], str]) -> str:
        if kind not in self._names:
            self._names[kind] = self._new()
            self.add(self._names[kind], body())
        return self._names[kind]

    def _new(self) -> str:
        self._count += 1
        return f"{self._name}_{self._count}"

    def _referred(self, reference: str) -> Any:
        found: Any = self._schema
        for step in unquote(reference.removeprefix("#")).split("/")[1:]:
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        return found


def _written(value: Any) -> str:
    if isinstance(value, str):
        return f"{_QUOTE}{value}{_QUOTE}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_written(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    return json.dumps(value)


def _scalar(word: str) -> str:
    """A word that is not JSON becomes a string."""
    word = _JSON_WORDS.get(word, word)
    try:
        value = json.loads(word)
    except ValueError:
        return json.dumps(word, ensure_ascii=False)
    return word if isinstance(value, bool | int | float) or value is None else json.dumps(word)


def _listed(item: str) -> str:
    return f'({item} ("," {item})*)?'


def _any_of(options: list[str]) -> str:
    return f"({' | '.join(options)})"
