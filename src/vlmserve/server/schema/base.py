"""Common parts of all requests: parsing, limits and error messages."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from vlmserve.errors import InvalidRequestError
from vlmserve.frontend.messages import MAX_DEPTH, is_too_deep
from vlmserve.server.schema.spelling import Spellings
from vlmserve.settings.validation import problem_text

logger = logging.getLogger(__name__)

MAX_COUNT = 2**31 - 1
"""Largest number in integer fields."""
MAX_FIELDS = 1000
"""Maximum fields of an object with a known schema."""
MAX_LOGGED = 1000
"""Maximum unknown names to log while the server runs."""
MAX_MISSPELT = 32
"""Unknown fields of an object whose spelling is checked."""
_SHOWN_NAME = 100
"""Logged characters of an unknown name."""
_EMPTY: tuple[Any, ...] = ([], {}, "")
"""Values without effect in unsupported fields."""
_STRING = re.compile(rb'"[^"]*"')
_NO_BACKSLASH = re.compile(rb"[^\\]")
WINDOW = 1024**2
"""Bytes of a body to search at a time, because the search blocks other threads."""


@dataclass(frozen=True)
class BodyLimits:
    max_values: int
    """JSON values, estimated."""
    max_messages: int
    """Objects in a list (messages, items, tools) and their parts."""


def _check_depth(value: dict[str, Any]) -> dict[str, Any]:
    if is_too_deep(value):
        raise ValueError(f"is nested too deeply: the limit is {MAX_DEPTH} levels")
    return value


JSONObject = Annotated[dict[str, Any], AfterValidator(_check_depth)]
"""Any JSON object, up to a maximum depth."""


def _fail_fast(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "dict"):
            schema["fail_fast"] = True
        for inner in schema.values():
            _fail_fast(inner)
    elif isinstance(schema, list | tuple):
        for inner in schema:
            _fail_fast(inner)


logged_fields: set[tuple[str, str]] = set()


def log_once(kind: str, name: str, line: str, level: int = logging.INFO) -> None:
    key = (kind, name[:_SHOWN_NAME])
    if key not in logged_fields and len(logged_fields) < MAX_LOGGED:
        logged_fields.add(key)
        logger.log(level, "%s %r %s (logged once)", *key, line)


def _field_error(name: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("field", "{message}", {"message": message, "field": name[:_SHOWN_NAME]})


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    null = {"type": "null"}
    if null in schema.get("anyOf", ()):
        return schema
    about: dict[str, Any] = {key: schema[key] for key in ("title", "description", "default") if key in schema}
    return {"anyOf": [{key: part for key, part in schema.items() if key not in about}, null], **about}


class RequestModel(BaseModel):
    """Base of requests: JSON types are not converted, null means absent, unknown fields are ignored.

    Unsupported fields that would change the answer are errors, and so are misspelt fields.
    """

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, hide_input_in_errors=True)

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Unsupported fields that would change the answer, with the values that have no effect."""
    ignored_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields that never change an answer. They are not logged."""
    other_names: ClassVar[Mapping[str, str]] = {}
    """Other servers' field names that are rejected, with the names to suggest."""
    renamed_fields: ClassVar[Mapping[str, str]] = {}
    """Other servers' field names that are accepted, with the names here."""

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, value: Any) -> Any:
        """Drop null and unknown fields. Raises InvalidRequestError for unsupported and misspelt fields."""
        if not isinstance(value, dict):
            return value
        if len(value) > MAX_FIELDS:
            raise ValueError(f"has more than {MAX_FIELDS} fields")
        for theirs, ours in cls.renamed_fields.items():
            if theirs in value:
                sent = value[theirs]
                value = {name: field for name, field in value.items() if name != theirs}
                if sent != "":  # an empty grammar is none
                    value = {ours: sent, **value}
        known = cls._known_fields()
        kept = {name: field for name, field in value.items() if field is not None and name in known}
        if len(kept) < len(value):
            ignored = known | cls.ignored_fields
            unknown = [name for name, field in value.items() if field is not None and name not in ignored]
            for number, name in enumerate(unknown):
                meant = cls._spellings().meant(name) if number < MAX_MISSPELT else cls.other_names.get(name)
                cls._check_unknown(name, value[name], meant)
        return kept

    @classmethod
    def _check_unknown(cls, name: str, value: Any, meant: str | None) -> None:
        if name in cls.neutral_values:
            if value not in (*cls.neutral_values[name], *_EMPTY):
                raise _field_error(name, "is not supported here; leave it out")
            return
        if meant is not None:
            raise _field_error(name, f"does not exist; did you mean {meant}?")
        log_once("Field", f"{cls.__name__}.{name}", "is unknown and ignored")

    @classmethod
    @functools.cache
    def _known_fields(cls) -> frozenset[str]:
        return frozenset(field.alias or name for name, field in cls.model_fields.items())

    @classmethod
    @functools.cache
    def _spellings(cls) -> Spellings:
        return Spellings({**cls.other_names, **{name: name for name in sorted(cls._known_fields())}})

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Let every optional field be null, as `_check_fields` does."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        required = schema.get("required", ())
        for name, field in schema.get("properties", {}).items():
            if name not in required:
                schema["properties"][name] = _or_null(field)
        return schema

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Stop validation at the first wrong entry of a list or object."""
        schema = handler(source)
        _fail_fast(schema)
        return schema


@dataclass(frozen=True)
class ByType:
    """Chooses a class of a union by the field ``type``. default: the type of values without one."""

    default: str | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        classes = {kind: one for one in get_args(source) for kind in get_args(one.model_fields["type"].annotation)}
        kinds = tuple(classes)

        def tag(value: Any) -> str | None:
            kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
            return f"<{kind or self.default}>" if (kind or self.default) in kinds else None

        message = f"must be an object of type {', '.join(map(repr, kinds))}"
        choose = Discriminator(tag, custom_error_type="type", custom_error_message=message)
        return _tagged(handler, {f"<{kind}>": one for kind, one in classes.items()}, choose)


@dataclass(frozen=True)
class TextOrList:
    """Chooses between a string and a list. items: what the list has, for errors."""

    items: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def tag(value: Any) -> str | None:
            return "<text>" if isinstance(value, str) else "<list>" if isinstance(value, list) else None

        message = f"must be a string or a list of {self.items}"
        choose = Discriminator(tag, custom_error_type="text_or_list", custom_error_message=message)
        return _tagged(handler, dict(zip(("<text>", "<list>"), get_args(source), strict=True)), choose)


def _tagged(handler: GetCoreSchemaHandler, members: Mapping[str, Any], choose: Discriminator) -> CoreSchema:
    """Tags in angle brackets never reach a client: `_path` leaves them out."""
    union: Any = Union[tuple(Annotated[member, Tag(tag)] for tag, member in members.items())]  # noqa: UP007
    return handler.generate_schema(Annotated[union, choose])


Body = TypeVar("Body", bound=RequestModel)

_PREDICATE = re.compile(r"(must|is|has|does) ")
_TEXTS = {"string_type": "must be a string", "string_pattern_mismatch": "must match {pattern}"}


def parse_body(kind: type[Body], body: bytes | bytearray, limits: BodyLimits) -> Body:
    """Parse a body. Raises InvalidRequestError for invalid JSON, wrong fields or a limit."""
    if _has_more_values(body, limits.max_values):
        raise InvalidRequestError(
            f"The body has more than {limits.max_values:,} JSON values, the server's limit (--max-body-values)"
        )
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"The body is not valid JSON: {_json_problem(error)}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("The body must be a JSON object")
    _check_num_messages(value, limits.max_messages)
    return validate(kind, value)


def _has_more_values(body: bytes | bytearray, most: int) -> bool:
    """Estimate JSON values by counting commas and brackets outside of strings."""
    if _num_values(body) <= most:
        return False
    count, start, inside = 0, 0, False
    while start < len(body):
        whole = _NO_BACKSLASH.search(body, start + WINDOW - 1)  # do not split an escape
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
    """Validate decoded JSON. Raises InvalidRequestError, naming the field."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        location = first["loc"]
        if first["type"] == "field":
            location = (*location, first["ctx"]["field"])
        path = _path(location)
        raise InvalidRequestError(_sentence(path, problem_text(first, _TEXTS)), param=path or None) from None


def _sentence(path: str, problem: str) -> str:
    """Join a path and its problem, which may be a sentence of its own."""
    if _PREDICATE.match(problem):
        return f"{path or 'The body'} {problem}"
    return f"{path}: {problem}" if path else problem


def _json_problem(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return str(error).removeprefix("JSON is malformed: ")


def _path(location: tuple[str | int, ...]) -> str:
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("<"):
            path += f".{part}" if path else part
    return path
