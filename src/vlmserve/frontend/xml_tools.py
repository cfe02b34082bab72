"""Qwen3-Coder's tool calls: a tag for the function, and one for each argument."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from vlmserve.errors import InvalidRequestError
from vlmserve.frontend.tools import ArgumentsReader, Function, ToolForm, guided, literal, overlap

_VALUE_END = "\n</parameter>"
_CALL_END = "</function>"
_KINDS = frozenset({"string", "number", "boolean", "null", "array", "object"})
_STRING, _BOOLEAN = frozenset({"string"}), frozenset({"boolean"})
_SPELLINGS = ("true", "false", "True", "False")
_DEFINITIONS = ("$defs", "definitions")
_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""The chat template writes some values in Python's spelling."""


@dataclass(frozen=True)
class XMLToolForm(ToolForm):
    """A form with a tag around each argument: strings are unquoted, other values are JSON.

    Arguments come in the schema's order. If it allows a string and another type, JSON of an allowed type is JSON.
    """

    call_start: ClassVar[str] = "<function="

    def head(self, function: Function) -> str:
        return f"<function={function.name}>\n"

    def written(self, name: str, arguments: dict[str, Any]) -> str:
        tags = ""
        for key, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            tags += f"<parameter={key}>\n{text}{_VALUE_END}\n"
        return self.wrapped(f"<function={name}>\n{tags}{_CALL_END}")

    @property
    def example(self) -> str:
        return f"<function=NAME>\n<parameter=ARGUMENT>\nVALUE{_VALUE_END}\n{_CALL_END}"

    def reader(self, function: Function) -> ArgumentsReader:
        return XMLArguments(function.schema)

    def call_rules(self, name: str, function: Function) -> list[str]:
        schema = function.schema
        properties = _properties(schema)
        required = schema.get("required") or ()
        rules, parts = [], []
        for number, (key, value) in enumerate(properties.items()):
            if not key or set(key) & {">", "\n"}:
                raise InvalidRequestError(
                    f"tools: the model's form of calls has no way to write the parameter {key!r:.100} of "
                    f"{function.name}; rename it",
                    param="tools",
                )
            part = f"{name}_{number}"
            parts.append(part if key in required else f"{part}?")
            rules += self._value_rules(part, key, value, schema, strict=function.strict)
        if not properties and schema.get("additionalProperties", True) is not False:
            parts.append(f"{name}_any*")
            rules.append(f'{name}_any: "<parameter=" /[^>\\n]+/ ">\\n" {name}_text')
            rules.append(_text_rule(f"{name}_text"))
        return [f"{name}: {literal(self.head(function))} {' '.join(parts)} {literal(_CALL_END)}", *rules]

    def _value_rules(self, name: str, key: str, value: Any, schema: Mapping[str, Any], *, strict: bool) -> list[str]:
        """The rule `name` for an argument, and the rules it needs."""
        begin, end = literal(f"<parameter={key}>\n"), literal(f"{_VALUE_END}\n")
        kinds = _kinds(value, schema)
        choices = _choices(value) if kinds == _STRING else _SPELLINGS if kinds == _BOOLEAN else ()
        if choices:
            return [f"{name}: {begin} ({' | '.join(map(json.dumps, choices))}) {end}"]
        if "string" in kinds:
            return [f"{name}: {begin} {name}_text", _text_rule(f"{name}_text")]
        whole = {**value, **{definitions: schema[definitions] for definitions in _DEFINITIONS if definitions in schema}}
        guide = guided(whole, strict, "tools", replace(self.bounds, length=0))
        return [f"{name}: {begin} {name}_json {end}", f"{name}_json: %json {json.dumps(guide)}"]


class XMLArguments:
    """Reads the tags of a call's arguments as JSON, streaming long strings."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._held = ""
        self._kinds: frozenset[str] | None = None
        """Types of the argument being read; None between arguments."""
        self._has_any = False

    def push(self, text: str) -> tuple[str, str | None]:
        self._held += text
        written = ""
        while True:
            held, kinds = self._held, self._kinds
            if kinds is None and held.lstrip().startswith(_CALL_END):
                rest = held.lstrip().removeprefix(_CALL_END)
                return written + ("}" if self._has_any else "{}"), rest
            written += self._read_name() if kinds is None else self._read_value(kinds)
            if (self._held, self._kinds) == (held, kinds):
                return written, None

    def _read_name(self) -> str:
        head, end, rest = self._held.lstrip().partition(">\n")
        if not end:
            return ""
        key = head.removeprefix("<parameter=")
        self._held = rest
        self._kinds = _kinds(_properties(self._schema).get(key, True), self._schema)
        begin = ", " if self._has_any else "{"
        self._has_any = True
        return f"{begin}{json.dumps(key, ensure_ascii=False)}: " + ('"' if self._kinds == _STRING else "")

    def _read_value(self, kinds: frozenset[str]) -> str:
        place = self._held.find(_VALUE_END)
        is_text = kinds == _STRING
        if place < 0 and not is_text:
            return ""
        end = place if place >= 0 else len(self._held) - overlap(self._held, _VALUE_END)
        text, self._held = self._held[:end], self._held[end:]
        if place >= 0:
            self._held = self._held.removeprefix(_VALUE_END)
            self._kinds = None
        return json.dumps(text, ensure_ascii=False)[1 : None if place >= 0 else -1] if is_text else _json(text, kinds)


def _json(text: str, kinds: frozenset[str]) -> str:
    """JSON if the argument has one of these types; else a string."""
    word = _PYTHON.get(text.strip(), text.strip())
    try:
        value = json.loads(word, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return word if _kind(value) in kinds else json.dumps(text, ensure_ascii=False)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _text_rule(name: str) -> str:
    return f"{name}[lazy]: TEXT {literal(f'{_VALUE_END}{chr(10)}')}"


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _choices(value: Any) -> Sequence[str]:
    """The only strings allowed as this argument; empty: any."""
    choices = [value["const"]] if "const" in value else value.get("enum") or []
    return [choice for choice in choices if isinstance(choice, str)]


def _kinds(value: Any, root: Mapping[str, Any], depth: int = 8) -> frozenset[str]:
    """The JSON types that a schema obviously allows. depth: of references to follow."""
    if not isinstance(value, dict) or depth == 0:
        return _KINDS
    kinds = _KINDS
    if isinstance(reference := value.get("$ref"), str):
        kinds &= _kinds(_referred(reference, root), root, depth - 1)
    if "type" in value:
        names = value["type"] if isinstance(value["type"], list) else [value["type"]]
        kinds &= {"number" if name == "integer" else name for name in names if isinstance(name, str)}
    if "const" in value or isinstance(value.get("enum"), list):
        kinds &= {_kind(choice) for choice in ([value["const"]] if "const" in value else value["enum"])}
    for name in ("anyOf", "oneOf"):
        if isinstance(options := value.get(name), list) and options:
            kinds &= frozenset().union(*(_kinds(option, root, depth - 1) for option in options))
    for part in value.get("allOf") or ():
        kinds &= _kinds(part, root, depth - 1)
    return kinds


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "null" if value is None else "object"
