"""Command line flags made from the settings, so that each is described in one place.

A command takes whole settings (``engine: EngineConfig``); `command` shows a flag for every field instead, reads and
checks them, and turns the errors that vlmserve raises on purpose into one red line and an exit code.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Collection
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer
from pydantic.fields import FieldInfo

from vlmserve.config import EngineConfig, MediaConfig, ServerConfig, Settings, parse_json, parse_size, read_settings
from vlmserve.errors import ConfigurationError, VLMServeError

PANELS: dict[type[Settings], str] = {EngineConfig: "Engine", MediaConfig: "Pictures", ServerConfig: "Server"}
SHORT = {"model": ("-m",)}

FAILED = 1
WRONG_USE = 2


def flag(name: str) -> str:
    """``--max-model-len`` for ``max_model_len``."""
    return "--" + name.replace("_", "-")


def command(fields: Collection[str] | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a typer command: expand parameters that are settings into flags, add ``--debug``, report errors.

    fields: the only ones that get a flag; default: all. A field with the name of another parameter of the command
    gets no flag but that parameter's value.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(function, include_extras=True)
        given = inspect.signature(function).parameters
        kinds = {name: hint for name, hint in hints.items() if isinstance(hint, type) and issubclass(hint, Settings)}
        plain = [p.replace(annotation=hints[name]) for name, p in given.items() if name not in kinds]
        flags: dict[str, inspect.Parameter] = {}
        for kind in kinds.values():
            for name, field in kind.model_fields.items():
                if (fields is None or name in fields) and not any(p.name == name for p in plain):
                    flags[name] = _parameter(kind, name, field)

        @functools.wraps(function)
        def run(debug: bool = False, **values: Any) -> None:
            try:
                settings = {
                    parameter: _read(kind, {k: v for k, v in values.items() if k in kind.model_fields}, flags)
                    for parameter, kind in kinds.items()
                }
                function(**settings, **{p.name: values[p.name] for p in plain})
            except VLMServeError as error:
                if debug:
                    raise
                report(str(error))
                raise typer.Exit(WRONG_USE if isinstance(error, ConfigurationError) else FAILED) from None

        parameters = [*plain, *flags.values(), _DEBUG]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def report(message: str) -> None:
    """One red line on the error stream."""
    from rich.console import Console

    Console(stderr=True).print(f"Error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)


def _read(kind: type[Settings], values: dict[str, Any], flags: dict[str, inspect.Parameter]) -> Settings:
    given = {name: value for name, value in values.items() if value != _default(kind.model_fields[name])}
    return read_settings(kind, given, lambda name: flag(name) if name in flags else name.upper())


def _parameter(kind: type[Settings], name: str, field: FieldInfo) -> inspect.Parameter:
    """An optional flag; its default is the settings' own."""
    option = typer.Option(
        *SHORT.get(name, ()),
        f"{flag(name)}/{flag('no_' + name)}" if field.annotation is bool else flag(name),
        help=field.description,
        show_default=field.default not in (None, ()) and not _is_json(field),
        metavar=_metavar(field),
        rich_help_panel=PANELS[kind],
    )
    annotation: Any = Annotated[_plain_type(field), option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_default(field), annotation=annotation)


def _is_size(field: FieldInfo) -> bool:
    return any(getattr(data, "func", None) is parse_size for data in _metadata(field))


def _is_json(field: FieldInfo) -> bool:
    return any(getattr(data, "func", None) is parse_json for data in _metadata(field))


def _metadata(field: FieldInfo) -> list[Any]:
    nested = [data for part in get_args(field.annotation) for data in getattr(part, "__metadata__", ())]
    return [*field.metadata, *nested]


def _plain_type(field: FieldInfo) -> Any:
    """The type that typer parses: ranges and patterns are the settings' business.

    A tuple becomes a flag that may be repeated.
    """
    if _is_size(field) or _is_json(field):
        return str | None
    annotation: Any = field.annotation
    if get_origin(annotation) in (Union, types.UnionType):
        [annotation] = [part for part in get_args(annotation) if part is not type(None)]
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is tuple:
        return list[get_args(annotation)[0]]  # type: ignore[misc]
    return annotation | None


def _metavar(field: FieldInfo) -> str | None:
    return "SIZE" if _is_size(field) else "JSON" if _is_json(field) else None


def _default(field: FieldInfo) -> Any:
    if isinstance(field.default, tuple):
        return list(field.default)
    if _is_json(field):
        return None
    return _size_text(field.default) if _is_size(field) and field.default is not None else field.default


def _size_text(size: int) -> str:
    for unit, factor in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


_DEBUG = inspect.Parameter(
    "debug",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")],
)
