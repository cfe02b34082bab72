"""Spellings of a setting's name, type and value."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from vlmserve.settings.base import Settings, annotation_parts, is_secret, parse_json, parse_size
from vlmserve.settings.config import EngineConfig, MediaConfig, ServerConfig
from vlmserve.settings.quantization import QuantizationConfig, engine_name

SECTIONS: Mapping[str, type[Settings]] = {"server": ServerConfig, "engine": EngineConfig, "media": MediaConfig}
"""All settings of a server, by section of the config file. Field names are unique across sections."""

LOCAL_FIELDS = (
    "model", "revision", "mmproj", "engine", "device", "dtype", "model_impl", "chat_template", "quantize",
    "max_model_len", "kv_cache_memory", "kv_cache_dtype", "num_threads",
)  # fmt: skip
"""Settings for commands where one person asks one question at a time."""
ANSWER_FIELDS = (*LOCAL_FIELDS, "draft_model")
"""Settings for commands where one person gets generated answers."""

QUANTIZATION_FIELDS = tuple(name for name in QuantizationConfig.model_fields if name != "scheme")
QUANTIZATION_DETAILS = tuple(name for name in map(engine_name, QUANTIZATION_FIELDS) if name.startswith("quantize_"))
"""Fields of `vlmserve quantize` besides the scheme, by their names in the engine's settings."""

PREFIX = "VLMSERVE_"
HIDDEN = "********"
SECTION_OF: dict[type[Settings], str] = {kind: section for section, kind in SECTIONS.items()}
_BOUNDS = (("ge", "at least {}"), ("gt", "over {}"), ("le", "at most {}"), ("lt", "under {}"))


def flag(name: str) -> str:
    """``--max-model-len`` for ``max_model_len``."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """``VLMSERVE_MAX_MODEL_LEN`` for ``max_model_len``."""
    return PREFIX + name.upper()


def section_of(name: str) -> str | None:
    return next((section for section, kind in SECTIONS.items() if name in kind.model_fields), None)


def is_size(field: FieldInfo) -> bool:
    """True for a number of bytes, with an optional unit."""
    return _is_read_by(field, parse_size)


def is_json(field: FieldInfo) -> bool:
    return _is_read_by(field, parse_json)


def is_list(field: FieldInfo) -> bool:
    return any(get_origin(part) is tuple for part in annotation_parts(field))


def is_switch(field: FieldInfo) -> bool:
    return field.annotation is bool


def plain_type(field: FieldInfo) -> Any:
    """The type to parse; the settings check ranges and patterns."""
    if is_size(field) or is_json(field):
        return str
    annotation: Any = field.annotation
    if get_origin(annotation) in (Union, types.UnionType):
        [annotation] = [part for part in get_args(annotation) if part is not type(None)]
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is tuple:
        annotation = list[get_args(annotation)[0]]  # type: ignore[misc]
    return {SecretStr: str, list[SecretStr]: list[str]}.get(annotation, annotation)


def type_name(field: FieldInfo) -> str:
    """The type in words, with bounds."""
    kind = plain_type(field)
    if is_size(field):
        return "size"
    if is_json(field):
        return "JSON"
    if get_origin(kind) is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(kind))
    if kind is bool:
        return "yes or no"
    name = {int: "whole number", float: "number", str: "text", list[str]: "list of texts"}.get(kind, str(kind))
    bounds = [text.format(getattr(data, at)) for at, text in _BOUNDS for data in metadata(field) if hasattr(data, at)]
    return ", ".join((name, *bounds))


def metadata(field: FieldInfo) -> list[Any]:
    nested = [data for part in get_args(field.annotation) for data in getattr(part, "__metadata__", ())]
    flat = [inner for data in nested for inner in (data.metadata if isinstance(data, FieldInfo) else (data,))]
    return [*field.metadata, *flat]


def size_text(size: int) -> str:
    """Bytes in the largest unit that leaves an integer."""
    for unit, factor in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def plain_value(field: FieldInfo, value: Any, *, sizes_as_text: bool = False) -> Any:
    """A value for JSON and TOML, without secrets."""
    if value is None or (is_secret(field) and not _secret_text(value)):
        return None
    if is_secret(field):
        return HIDDEN
    if isinstance(value, Settings):
        return value.model_dump(exclude_none=True)
    if isinstance(value, tuple):
        return list(value)
    return size_text(value) if sizes_as_text and is_size(field) else value


def toml(value: Any) -> str:
    """TOML of a plain value. A dict, without None, becomes an inline table."""
    if isinstance(value, dict):
        entries = ", ".join(f"{key} = {toml(entry)}" for key, entry in value.items())
        return f"{{ {entries} }}" if entries else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, str):
        # TOML also escapes DEL, unlike JSON.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _is_read_by(field: FieldInfo, reader: Callable[[Any], Any]) -> bool:
    return any(getattr(data, "func", None) is reader for data in metadata(field))


def _secret_text(value: Any) -> Any:
    return value.get_secret_value() if isinstance(value, SecretStr) else value
