"""Turns pydantic's errors into plain English."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

from pydantic_core import ErrorDetails

_NUMBER = "must be a number"
_WHOLE_NUMBER = "must be a whole number"
_SWITCH = "must be true or false"
_LIST = "must be a list"
_OBJECT = "must be a JSON object"

_TEXTS: Mapping[str, str] = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be greater than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "literal_error": "must be {expected}",
    "value_error": "{error}",
    "int_type": _WHOLE_NUMBER,
    "int_parsing": _WHOLE_NUMBER,
    "int_from_float": _WHOLE_NUMBER,
    "int_parsing_size": "is too large",
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": "must be a finite number",
    "bool_type": _SWITCH,
    "bool_parsing": _SWITCH,
    "string_type": "must be text",
    "string_pattern_mismatch": "is not one of the possible values",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} characters",
    "too_long": "must have at most {max_length} entries",
    "too_short": "must have at least {min_length} entries",
    "tuple_type": _LIST,
    "list_type": _LIST,
    "dict_type": _OBJECT,
    "model_type": _OBJECT,
    "mapping_type": _OBJECT,
    "model_attributes_type": _OBJECT,
    "missing": "is missing",
    "extra_forbidden": "does not exist",
}
"""By pydantic's error types, which are stable; its sentences are not."""


def problem_text(problem: ErrorDetails, texts: Mapping[str, str] = MappingProxyType({})) -> str:
    """The rule that a value breaks, like "must be at least 1". texts: override the usual ones, by pydantic's type."""
    context = problem.get("ctx", {})
    if context.get("min_length") == 1:
        return "must not be empty"
    text = texts.get(problem["type"]) or _TEXTS.get(problem["type"])
    if text is None:
        message = problem["msg"].removeprefix("Value error, ")
        return message[:1].lower() + message[1:]
    bounds = context.items()
    return text.format(**{name: f"{bound:g}" if isinstance(bound, float) else bound for name, bound in bounds})


def did_you_mean(name: str, known: Collection[str], describe: Callable[[str], str] = str) -> str:
    """``; did you mean NAME?`` for the known name nearest to `name`, or ""."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {describe(close[0])}?" if close else ""


def value_text(value: Any) -> str:
    """A value as a person wrote it, quoted if its end would be unclear."""
    if isinstance(value, list | tuple) and value:
        return ", ".join(map(value_text, value))
    return value if isinstance(value, str) and value and not set(value) & set(" \n\t'\":;,") else repr(value)
