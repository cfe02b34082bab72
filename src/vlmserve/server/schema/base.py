"""What all bodies have in common: how they are read and what is said of wrong ones."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, ValidationError, model_validator

from vlmserve.errors import InvalidRequestError
from vlmserve.frontend.messages import MAX_DEPTH, is_too_deep

MAX_COUNT = 2**31 - 1
"""The largest number that anybody may want to count to."""


def _check_depth(value: dict[str, Any]) -> dict[str, Any]:
    if is_too_deep(value):
        raise ValueError(f"Input is nested too deeply; at most {MAX_DEPTH} levels are read")
    return value


JSONObject = Annotated[dict[str, Any], AfterValidator(_check_depth)]
"""Whatever a client likes."""


class RequestModel(BaseModel):
    """Base of what clients send: JSON types are not converted, unknown fields are errors, null means absent."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        return {key: field for key, field in value.items() if field is not None} if isinstance(value, dict) else value


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


def parse_body(kind: type[Body], body: bytes | bytearray) -> Body:
    """Raises InvalidRequestError, naming the field, for a body that is not JSON or not of that kind."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"The body is not valid JSON: {_json_problem(error)}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("The body should be a JSON object")
    return validate(kind, value)


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
