"""What all bodies have in common: how they are read and what is said of wrong ones."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    GetCoreSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema

from vlmserve.errors import InvalidRequestError
from vlmserve.frontend.messages import MAX_DEPTH, is_too_deep

MAX_COUNT = 2**31 - 1
"""The largest number that anybody may want to count to."""
MAX_FIELDS = 1000
"""Fields of an object whose fields are known."""
_STRING = re.compile(rb'"[^"]*"')
_NO_BACKSLASH = re.compile(rb"[^\\]")
_WINDOW = 1024**2
"""Bytes of a body that are searched at a time: no other thread runs meanwhile."""


@dataclass(frozen=True)
class BodyLimits:
    """What a body may hold. max_values: JSON values, roughly. max_messages: objects in lists: messages, items, tools,
    and the parts of each."""

    max_values: int
    max_messages: int


def _check_depth(value: dict[str, Any]) -> dict[str, Any]:
    if is_too_deep(value):
        raise ValueError(f"Input is nested too deeply; at most {MAX_DEPTH} levels are read")
    return value


JSONObject = Annotated[dict[str, Any], AfterValidator(_check_depth)]
"""Whatever a client likes."""


def _fail_fast(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "dict"):
            schema["fail_fast"] = True
        for inner in schema.values():
            _fail_fast(inner)
    elif isinstance(schema, list | tuple):
        for inner in schema:
            _fail_fast(inner)


class RequestModel(BaseModel):
    """Base of what clients send: JSON types are not converted, unknown fields are errors, null means absent."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > MAX_FIELDS:
            raise ValueError(f"Input has more than {MAX_FIELDS} fields")
        return {key: field for key, field in value.items() if field is not None}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Report only the first wrong entry of a list or an object, so that validation stops there."""
        schema = handler(source)
        _fail_fast(schema)
        return schema


# Tags in angle brackets never reach a client: `_path` leaves them out.
def by_type(*kinds: str) -> Discriminator:
    """Of objects that say in their field ``type`` which of several they are; their tags are ``<type>``."""

    def tag(value: Any) -> str | None:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return f"<{kind}>" if kind in kinds else None

    message = f"Input should be an object with a type out of {', '.join(map(repr, kinds))}"
    return Discriminator(tag, custom_error_type="type", custom_error_message=message)


def text_or_list(items: str) -> Discriminator:
    """Of a string, whose tag is ``<text>``, and a list of such items, whose tag is ``<list>``."""

    def tag(value: Any) -> str | None:
        return "<text>" if isinstance(value, str) else "<list>" if isinstance(value, list) else None

    message = f"Input should be a string or a list of {items}"
    return Discriminator(tag, custom_error_type="text_or_list", custom_error_message=message)


Body = TypeVar("Body", bound=RequestModel)

_MESSAGES = {
    "missing": "Field is missing",
    "extra_forbidden": "There is no such field",
    "too_short": "Input should not be empty",
    "model_type": "Input should be an object",
}


def parse_body(kind: type[Body], body: bytes | bytearray, limits: BodyLimits) -> Body:
    """Raises InvalidRequestError, naming the field, for a body that is not JSON, not of that kind or over a limit."""
    if _has_more_values(body, limits.max_values):
        raise InvalidRequestError(
            f"The body has more than {limits.max_values:,} JSON values, the server's limit (--max-body-values)"
        )
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"The body is not valid JSON: {_json_problem(error)}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("The body should be a JSON object")
    _check_num_messages(value, limits.max_messages)
    return validate(kind, value)


def _has_more_values(body: bytes | bytearray, most: int) -> bool:
    """Whether a body has so many JSON values that reading it would take long: commas and brackets outside of strings
    are counted."""
    if _num_values(body) <= most:
        return False
    count, start, inside = 0, 0, False
    while start < len(body):
        whole = _NO_BACKSLASH.search(body, start + _WINDOW - 1)  # so that no escape is cut in two
        end = len(body) if whole is None else whole.end()
        piece = body[start:end].replace(rb"\\", b"").replace(rb"\"", b"")
        start = end
        if inside:
            _, closing, piece = piece.partition(b'"')
            if not closing:
                continue
        inside = piece.count(b'"') % 2 == 1
        if inside:
            piece = piece[: piece.rindex(b'"')]
        count += _num_values(_STRING.sub(b"", piece))
        if count > most:
            return True
    return False


def _num_values(text: bytes | bytearray) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def _check_num_messages(body: dict[str, Any], most: int) -> None:
    for name, field in body.items():
        if not isinstance(field, list):
            continue
        count = 0
        for entry in field:
            if isinstance(entry, dict):
                count += 1 + sum(len(inner) for inner in entry.values() if isinstance(inner, list))
            if count > most:
                raise InvalidRequestError(
                    f"{name} has more than {most:,} entries and parts, the server's limit (--max-messages)", param=name
                )


def validate(kind: type[Body], value: dict[str, Any]) -> Body:
    """Raises InvalidRequestError, naming the field, for fields that are not of that kind."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        path = _path(first["loc"])
        message = _MESSAGES.get(first["type"], first["msg"].removeprefix("Value error, "))
        raise InvalidRequestError(f"{path}: {message}" if path else message, param=path or None) from None


def _json_problem(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return str(error).removeprefix("JSON is malformed: ")


def _path(location: tuple[str | int, ...]) -> str:
    """``messages[0].content[1].image_url.url``"""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("<"):
            path += f".{part}" if path else part
    return path
