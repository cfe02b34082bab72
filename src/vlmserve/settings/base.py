"""Base class of settings: parses text and suggests corrections in errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from vlmserve.errors import ConfigurationError
from vlmserve.settings import vllm_flags
from vlmserve.settings.validation import did_you_mean, problem_text, value_text

_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{unit}ib": 1024**power for power, unit in enumerate("kmgt", start=1)}
_UNITS |= {f"{unit}b": 1000**power for power, unit in enumerate("kmgt", start=1)}


def parse_size(value: Any) -> Any:
    """Parse a size: ``4GiB``, ``512 MB``, ``1.5g``, ``1048576``; return bytes.

    Raises ValueError for other text. Returns values that are not text unchanged.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{value!r} is not a size; write a number with a unit, like 4GiB or 512MB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def parse_json(value: Any) -> Any:
    """Parse JSON text. Raises ValueError for other text. Returns values that are not text unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"{value!r} is not JSON ({error})") from None


ByteSize = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]


def parse_list(text: str) -> list[Any]:
    """Split a list written as JSON or with commas. Raises ValueError for invalid JSON."""
    if not text.lstrip().startswith("["):
        return [entry.strip() for entry in text.split(",") if entry.strip()]
    try:
        entries: list[Any] = json.loads(text)
    except ValueError as error:
        raise ValueError(f'{text!r} is not a JSON list ({error}); write a,b or ["a", "b"]') from None
    return entries


class Settings(BaseModel):
    """Base of all settings: immutable, rejects unknown keys, parses text."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    @field_validator("*", mode="before")
    @classmethod
    def _from_text(cls, value: Any, info: ValidationInfo) -> Any:
        """Parse lists and numeric choices in environment variables and files, which pydantic does not.

        Reject yes and no for the numbers 1 and 0, which pydantic accepts.
        """
        parts = annotation_parts(cls.model_fields[str(info.field_name)])
        if isinstance(value, bool) and bool not in parts:
            raise ValueError("write a value; true and false are not allowed here")
        if not isinstance(value, str):
            return value
        if any(get_origin(part) is tuple for part in parts):
            return parse_list(value)
        numbers = {str(choice): choice for part in parts if get_origin(part) is Literal for choice in get_args(part)}
        return numbers.get(value, value)


def annotation_parts(field: FieldInfo) -> tuple[Any, ...]:
    """A field's type and all types in it: ``tuple[int, ...] | None`` gives the union, the tuple, int…"""

    def parts(annotation: Any) -> list[Any]:
        inner = () if get_origin(annotation) is Literal else get_args(annotation)
        return [annotation, *(part for one in inner for part in parts(one))]

    return tuple(parts(field.annotation))


def is_secret(field: FieldInfo) -> bool:
    """True if a value is never shown: a SecretStr, or a field with ``repr=False``."""
    return SecretStr in annotation_parts(field) or not field.repr


SettingsT = TypeVar("SettingsT", bound=Settings)


def read_settings(kind: type[SettingsT], values: Mapping[str, Any], spelling: Callable[[str], str] = str) -> SettingsT:
    """Make settings from a person's values. spelling: returns a field's name as the person wrote it.

    Raises ConfigurationError: one line that names every wrong value and what it should be.
    """
    try:
        return kind(**values)
    except ValidationError as error:
        problems = [_problem(kind, problem, spelling) for problem in error.errors(include_url=False)]
        raise ConfigurationError("; ".join(problems)) from None


def check_names(names: Iterable[str], kinds: Sequence[type[Settings]], others: Iterable[str] = ()) -> None:
    """Raise ConfigurationError for unknown names, and suggest the nearest known one. others: additional known names."""
    known = {name for kind in kinds for name in kind.model_fields}
    if unknown := [name for name in names if name not in known]:
        known.update(others)
        problems = [f"there is no option {name}{vllm_flags.hint(name, known, str)}" for name in unknown]
        raise ConfigurationError("; ".join(problems))


def _problem(kind: type[Settings], problem: ErrorDetails, spelling: Callable[[str], str]) -> str:
    """Describe one wrong value: its name, the value unless it is secret, and the problem."""
    text = problem_text(problem)
    if not problem["loc"]:  # it is about several fields
        return text
    name, *path = map(str, problem["loc"])
    field = kind.model_fields.get(name)
    if field is None:
        return f"there is no setting {name}{did_you_mean(name, kind.model_fields, spelling)}"
    if is_secret(field):
        return f"{spelling(name)}: the value is not valid; it is secret and not shown"
    if problem["type"] == "extra_forbidden":
        known = sorted({key for part in annotation_parts(field) for key in getattr(part, "model_fields", ())})
        return f"{spelling(name)}: there is no key {'.'.join(path)}; use {', '.join(known)}"
    place = " ".join((spelling(name), *path))
    return f"{place} {value_text(problem['input'])}: {text}"
