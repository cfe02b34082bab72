"""Prepares JSON schemas for llguidance: closes objects, and bounds values."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import unquote

from vlmserve.sampling.dialects import NUMBER_BOUNDS, contradict, readable
from vlmserve.settings.config import EngineConfig

WHITESPACE = r"[ ]|\r?\n[ \t]{0,64}"
"""Whitespace in JSON as people and json.dumps write it. A confused model would write whitespace endlessly."""
_KEPT_SCHEMAS = 256
_DECIMALS = 9
"""Decimal places of a number that the schema does not bound."""
_MAX_COMBINED = 32
"""Maximum number of objects in an ``anyOf`` that an answer may combine: each gets the properties of the others."""
_MAX_COMBINED_PROPERTIES = 256
"""Maximum number of properties in these objects together. More properties take long to compile."""
_MAX_REFERENCES = 8
"""Maximum number of references to follow from an object of an ``anyOf`` to its definition."""
_DESCRIBING = frozenset({"$ref", "title", "description", "default", "examples", "deprecated"})
"""Keywords that may stand next to a reference without changing its meaning."""


@dataclass(frozen=True)
class JSONBounds:
    """Limits for values that a schema leaves unbounded; 0: no limit."""

    digits: int = 0
    """Digits of a number."""
    length: int = 0
    """Characters of a string."""
    items: int = 0

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        return cls(config.json_max_digits, config.json_max_length, config.json_max_items)


UNBOUNDED = JSONBounds()


_ANY = "any JSON value"
_ANY_VALUE = {"$ref": "#/$defs/any%20JSON%20value"}


def any_object(bounds: JSONBounds) -> dict[str, Any]:
    return guided_schema({"type": "object"}, strict=True, bounds=bounds)


@functools.lru_cache(_KEPT_SCHEMAS)
def relaxed_keywords(text: str) -> tuple[str, ...]:
    """Keywords that answers need not obey."""
    return tuple(sorted(readable(read_schema(text), 0, strict=False)[1]))


def _with_any_value(schema: dict[str, Any], bounds: JSONBounds) -> dict[str, Any]:
    if bounds == UNBOUNDED:
        return schema
    opened = _opened(schema)
    if opened == schema:
        return schema
    kinds: list[dict[str, Any]] = [{"type": kind} for kind in ("string", "number", "boolean", "null")]
    kinds += [{"type": "array", "items": _ANY_VALUE}, {"type": "object", "additionalProperties": _ANY_VALUE}]
    value = {_ANY: {"anyOf": kinds}}
    if "$ref" in opened and "$defs" not in opened:
        return {**opened, "$defs": value}
    return {**opened, "$defs": {**opened.get("$defs", {}), **value}}


def _opened(schema: Any) -> Any:
    """Refer to `_ANY` for parts that allow any value, except in conditions."""
    if schema is True:
        return _ANY_VALUE
    if not isinstance(schema, dict):
        return schema
    opened = dict(schema)
    for name in _NAMED_SCHEMAS:
        if isinstance(schema.get(name), dict):
            opened[name] = {key: _opened(inner) for key, inner in schema[name].items()}
    for name in _LISTED_SCHEMAS:
        if isinstance(schema.get(name), list):
            opened[name] = [_opened(inner) for inner in schema[name]]
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict) or schema.get(name) is True:
            opened[name] = _opened(schema[name])
    if not schema.keys() & _SHAPING:
        return {**opened, **_ANY_VALUE}
    kinds = schema["type"] if isinstance(schema.get("type"), list) else [schema.get("type")]
    if "array" in kinds and not schema.keys() & {"items", "prefixItems", "enum", "const"}:
        opened["items"] = _ANY_VALUE
    if "object" in kinds and not schema.keys() & {"properties", *_OTHER_PROPERTIES, "enum", "const"}:
        opened["additionalProperties"] = _ANY_VALUE
    return opened


def guided_schema(
    schema: Mapping[str, Any], *, strict: bool, bounds: JSONBounds, combine: bool = True
) -> dict[str, Any]:
    """Return a JSON schema for llguidance. Raises ValueError for too deep nesting.

    strict: reject unknown keywords. combine: unless strict, let an answer have the properties of several objects of an
    ``anyOf``.

    Objects get no unnamed properties, unless the schema mentions them: models could invent them endlessly. Schemas that
    combine several for one object do not change.
    """
    options = {"whitespace_pattern": WHITESPACE, "lenient": not strict, "coerce_one_of": not strict}
    try:
        schema, _ = readable(schema, 10**bounds.digits - 1, strict=strict)
        combines = any(map(_combines, _schemas(schema)))
        followed = _bounded(
            schema if combines else _with_any_value(_closed(schema, schema, combine=combine and not strict), bounds),
            bounds,
        )
        return {**followed, "x-guidance": options}
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


_NAMED_SCHEMAS = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
_LISTED_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SCHEMAS = ("items", "additionalProperties", "contains", "propertyNames", "if", "then", "else")
_OTHER_PROPERTIES = ("additionalProperties", "unevaluatedProperties", "patternProperties")
_SHAPING = frozenset(
    {"type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf", "not", "if", "properties", "required", "items"}
    | {"prefixItems", "pattern", "format", "minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum"}
    | {"exclusiveMinimum", "exclusiveMaximum", "multipleOf", "contains", "uniqueItems", "dependentRequired"}
    | {"dependentSchemas", "propertyNames", "minProperties", "maxProperties", *_OTHER_PROPERTIES}
)
"""Keywords that restrict the value."""
_MORE_OF_THE_SAME = ("$ref", "anyOf", "oneOf", "allOf", "if", "dependentSchemas")


def _schemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Includes the schema itself."""
    if not isinstance(schema, dict):
        return
    yield schema
    for name in _NAMED_SCHEMAS:
        for inner in schema[name].values() if isinstance(schema.get(name), dict) else ():
            yield from _schemas(inner)
    for name in _LISTED_SCHEMAS:
        for inner in schema[name] if isinstance(schema.get(name), list) else ():
            yield from _schemas(inner)
    for name in _SCHEMAS:
        yield from _schemas(schema.get(name))


def _combines(schema: Mapping[str, Any]) -> bool:
    parts = schema.get("allOf")
    several = isinstance(parts, list) and len(parts) > 1
    return several or "if" in schema or ("properties" in schema and any(name in schema for name in _MORE_OF_THE_SAME))


def _closed(schema: Any, root: Mapping[str, Any], *, combine: bool) -> Any:
    """Remove unnamed properties. root: resolves references.

    An ``anyOf`` inside an ``anyOf`` is not combined, because the schema would grow exponentially.
    """
    if not isinstance(schema, dict):
        return schema
    choices = _targets(schema.get("anyOf"), root) if combine else []
    combine_here = bool(choices) and all(map(_is_open_object, choices))
    inner_too = combine and not combine_here
    closed = dict(schema)
    for name in _NAMED_SCHEMAS:
        if isinstance(schema.get(name), dict):
            closed[name] = {key: _closed(inner, root, combine=inner_too) for key, inner in schema[name].items()}
    for name in _LISTED_SCHEMAS:
        if isinstance(schema.get(name), list):
            closed[name] = [_closed(inner, root, combine=inner_too) for inner in schema[name]]
    for name in _SCHEMAS:
        if isinstance(schema.get(name), dict):
            closed[name] = _closed(schema[name], root, combine=inner_too)
    if _is_open_object(schema):
        closed["additionalProperties"] = False
    if combine_here:
        combinable = _combinable([_closed(choice, root, combine=False) for choice in choices])
        if sum(len(one["properties"]) for one in combinable) <= _MAX_COMBINED_PROPERTIES:
            closed["anyOf"] = combinable
    return closed


def _targets(schemas: Any, root: Mapping[str, Any]) -> list[Any]:
    """Resolve an ``anyOf``; empty for too many schemas."""
    if not isinstance(schemas, list) or len(schemas) > _MAX_COMBINED:
        return []
    return [_target(schema, root) for schema in schemas]


def _target(schema: Any, root: Mapping[str, Any]) -> Any:
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or "$ref" not in schema or schema.keys() - _DESCRIBING:
            break
        pointer = schema["$ref"]
        if not isinstance(pointer, str) or not pointer.startswith("#/"):
            break
        schema = root
        for part in unquote(pointer[2:]).split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, dict) else None
    return schema


def _is_open_object(schema: Any) -> bool:
    """Return whether a schema names properties and says nothing about others."""
    if not isinstance(schema, dict) or not isinstance(schema.get("properties"), dict):
        return False
    return not any(name in schema for name in _OTHER_PROPERTIES)


def _combinable(schemas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the properties of all objects that do not contradict."""
    combinable = []
    for schema in schemas:
        properties = schema["properties"]
        for other in schemas:
            if not contradict(schema["properties"], other["properties"]):
                properties = properties | other["properties"] | properties  # its own properties come first and win
        combinable.append({**schema, "properties": properties})
    return combinable


def read_schema(text: str) -> dict[str, Any]:
    """Raises ValueError for invalid text, and for a schema that no value fits."""
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the schema is not JSON: {error}") from None
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    if not isinstance(schema, dict | bool):
        raise ValueError("a JSON schema is an object or a boolean")
    if schema is False:
        raise ValueError("no value fits the schema false")
    return {} if schema is True else schema


def _bounded(schema: Any, bounds: JSONBounds) -> Any:
    """Add missing bounds, except in conditions (``if``, ``contains``)."""
    if not isinstance(schema, dict):
        return schema
    bounded = dict(schema)
    for name in _NAMED_SCHEMAS:
        if isinstance(schema.get(name), dict):
            bounded[name] = {key: _bounded(inner, bounds) for key, inner in schema[name].items()}
    for name in _LISTED_SCHEMAS:
        if isinstance(schema.get(name), list):
            bounded[name] = [_bounded(inner, bounds) for inner in schema[name]]
    for name in ("items", "additionalProperties", "then", "else"):
        if isinstance(schema.get(name), dict):
            bounded[name] = _bounded(schema[name], bounds)
    if any(name in schema for name in ("enum", "const")):
        return bounded
    kinds = schema.get("type")
    if kinds is None and not any(name in schema for name in _MORE_OF_THE_SAME):
        kinds = ["number", "string", "array"]
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if bounds.digits and ("integer" in kinds or "number" in kinds):
        bounded |= _number_bounds(schema, bounds.digits, decimals="number" in kinds)
    shaped = any(name in schema for name in ("maxLength", "pattern", "format"))
    if bounds.length and "string" in kinds and not shaped and _least(schema, "minLength") <= bounds.length:
        bounded["maxLength"] = bounds.length
    first = schema.get("prefixItems")
    least = max(_least(schema, "minItems"), len(first) if isinstance(first, list) else 0)
    if bounds.items and "array" in kinds and "maxItems" not in schema and least <= bounds.items:
        bounded["maxItems"] = bounds.items
    return bounded


def _number_bounds(schema: Mapping[str, Any], digits: int, *, decimals: bool) -> dict[str, Any]:
    own = [schema[name] for name in NUMBER_BOUNDS if isinstance(schema.get(name), int | float)]
    largest = 10**digits - 1
    bounds: dict[str, Any] = {}
    if all(abs(value) <= largest for value in own):
        if not any(name in schema for name in ("minimum", "exclusiveMinimum")):
            bounds["minimum"] = -largest
        if not any(name in schema for name in ("maximum", "exclusiveMaximum")):
            bounds["maximum"] = largest
    fine = any(round(value, _DECIMALS) != value or 0 < abs(value) < 0.001 for value in own)
    if decimals and "multipleOf" not in schema and not fine:
        bounds["multipleOf"] = 10**-_DECIMALS
    return bounds


def _least(schema: Mapping[str, Any], name: str) -> int:
    value = schema.get(name)
    return value if isinstance(value, int) else 0
