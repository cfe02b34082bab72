"""Makes command line flags from settings."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer
from pydantic.fields import FieldInfo

from vlmserve.cli.fields import SECTION_OF, flag, is_json, is_list, is_size, is_switch, plain_type, size_text
from vlmserve.cli.help import HELP_ALL_PARAMETER, Rare, keyword
from vlmserve.cli.messages import FAILED, exit_status, report
from vlmserve.cli.sources import CONFIG, WORKER, Found, Origin, Origins, described, read_sources
from vlmserve.cli.spellings import WRITTEN
from vlmserve.errors import ConfigurationError, VLMServeError
from vlmserve.settings.base import Settings, is_secret, read_settings
from vlmserve.settings.quantization import Quantize, Scheme

SHORT = {"model": ("-m",)}


class Workers(dict[str, dict[str, Any]]):
    """Settings of each worker, by the command's parameters; empty if ``--worker`` names one."""


class Models(dict[str, dict[str, Any]]):
    """Settings of each model, likewise."""


def command(
    fields: Collection[str] | None = None, common: Collection[str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a typer command: expand settings into flags, add ``--debug``, report errors in a red line.

    fields: restrict flags, environment and file (default: all). A field named like another parameter gets its value.
    Settings outside the config file come from flags only. Parameters of type `Origins`, `Workers` or `Models` get the
    sources, or the settings of every worker or model. common: fields that ``--help`` shows, in order (default: all).
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(function, include_extras=True)
        given = inspect.signature(function).parameters
        kinds = {name: hint for name, hint in hints.items() if isinstance(hint, type) and issubclass(hint, Settings)}
        has_file = bool(SECTION_OF.keys() & kinds.values())
        extra = {name: hint for name, hint in hints.items() if hint in (Origins, Workers, Models)}
        made = {*kinds, *extra}
        plain = {name: p.replace(annotation=hints[name]) for name, p in given.items() if name not in made}
        flags: dict[str, inspect.Parameter] = {}
        for kind in kinds.values():
            for name, field in kind.model_fields.items():
                if (fields is None or name in fields) and name not in plain:
                    flags[name] = _parameter(kind, name, field, is_rare=common is not None and name not in common)
        first = {name: flags[name] for name in common or ()}

        @functools.wraps(function)
        def run(
            context: typer.Context,
            debug: bool = False,
            settings_file: Path | None = None,
            worker: str | None = None,
            **values: Any,
        ) -> None:
            try:
                typed = {name: values[name] for name in values if _is_typed(context, name)}
                values_of = {name: values[name] for name in plain}
                if kinds:
                    written = {name: name.upper() for name in plain} | context.meta.get(WRITTEN, {})

                    def read(worker: str | None, model: str | None = None) -> tuple[dict[str, Settings], Origins]:
                        found = read_sources(settings_file, worker, os.environ, model) if has_file else {}
                        return _read(kinds, typed, {*flags, *plain}, written, found)

                    settings, origins = read(worker)
                    values_of |= settings
                    for name, hint in extra.items():
                        values_of[name] = origins if hint is Origins else _all(hint, settings_file, worker, read)
                function(**values_of)
            except VLMServeError as error:
                if debug:
                    raise
                report(str(error))
                raise typer.Exit(exit_status(error)) from None
            except OSError as error:
                if debug or error.filename is None:  # about a file that nobody named
                    raise
                report(f"{error.filename}: {error.strerror}")
                raise typer.Exit(FAILED) from None

        places = [_SETTINGS_FILE, _WORKER] if has_file else []
        shown = [HELP_ALL_PARAMETER] if common else []
        parameters = [*plain.values(), *(first | flags).values(), *places, _DEBUG, *shown, _CONTEXT]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _all(
    kind: type[Workers | Models],
    settings_file: Path | None,
    worker: str | None,
    read: Callable[[str | None, str | None], tuple[dict[str, Settings], Origins]],
) -> Workers | Models:
    """Settings of all workers or models. read: reads one's."""
    if kind is Models:
        return Models((one, read(worker, one)[0]) for one in described(settings_file, os.environ, "model"))
    is_one = worker is not None or bool(os.environ.get(WORKER))
    workers = [] if is_one else described(settings_file, os.environ, "worker")
    return Workers((one, read(one, None)[0]) for one in workers)


def schemes(names: list[str] | None) -> tuple[str, ...]:
    """Named schemes, or all that keep inputs unrounded. Raises ConfigurationError."""
    known = get_args(Quantize)
    for name in names or ():
        if name not in known:
            raise ConfigurationError(f"--scheme {name}: must be one of {', '.join(known)}")
    return tuple(names or get_args(Scheme))


def panel(kind: type[Settings]) -> str:
    meaning = (kind.__doc__ or "").partition("\n")[0].rstrip(".")
    return f"{SECTION_OF[kind].capitalize()}: {meaning[:1].lower()}{meaning[1:]}" if kind in SECTION_OF else meaning


def _is_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _read(
    kinds: Mapping[str, type[Settings]],
    typed: Mapping[str, Any],
    known: Collection[str],
    written: Mapping[str, str],
    found: Mapping[str, Found],
) -> tuple[dict[str, Settings], Origins]:
    """Return settings by the command's parameter, and their sources.

    typed: values on the command line. known: the command's fields. written: flags in another spelling. found: values
    from elsewhere.
    """
    origins, settings = Origins(), {}
    for parameter, kind in kinds.items():
        values: dict[str, Any] = {}
        for name in kind.model_fields:
            if name in typed:
                values[name], origins[name] = typed[name], Origin("flag", written.get(name, flag(name)))
            elif name in known and name in found:
                values[name], origins[name] = found[name]
        settings[parameter] = read_settings(
            kind, values, lambda name: origins[name].name if name in origins else flag(name)
        )
    return settings, origins


def _parameter(kind: type[Settings], name: str, field: FieldInfo, *, is_rare: bool) -> inspect.Parameter:
    option = typer.Option(
        *SHORT.get(name, ()),
        f"{flag(name)}/{flag('no_' + name)}" if field.annotation is bool else flag(name),
        help=_help(field),
        show_default=not (is_json(field) or is_secret(field) or is_switch(field)) and field.default not in (None, ()),
        metavar=_metavar(field),
        autocompletion=_completion(_choices(field)),
        rich_help_panel=Rare(panel(kind)) if is_rare else panel(kind),
    )
    return keyword(name, _typed(field) | None, option, _default(field))


def _typed(field: FieldInfo) -> Any:
    """The type to parse; the settings parse others from text."""
    return bool if is_switch(field) else list[str] if is_list(field) else str


def _choices(field: FieldInfo) -> list[str]:
    kind = plain_type(field)
    return [str(choice) for choice in get_args(kind)] if get_origin(kind) is Literal else []


def _completion(choices: Collection[str]) -> Callable[[str], list[str]] | None:
    if not choices:
        return None

    def complete(incomplete: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(incomplete)]

    return complete


def _help(field: FieldInfo) -> str:
    text = field.description or ""
    return f"{text}  [default: {'on' if field.default else 'off'}]" if is_switch(field) else text


def _metavar(field: FieldInfo) -> str | None:
    if is_size(field) or is_json(field):
        return "SIZE" if is_size(field) else "JSON"
    if choices := _choices(field):
        return "|".join(choices)
    kind = plain_type(field)
    return {int: "INT", float: "FLOAT", str: "TEXT", list[str]: "TEXT"}.get(kind)


def _default(field: FieldInfo) -> Any:
    """Shown in help only; never reaches the settings."""
    if is_list(field) or is_secret(field) or is_json(field):
        return None
    if field.default is None or is_switch(field):
        return field.default
    return size_text(field.default) if is_size(field) else str(field.default)


_CONTEXT = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
_FILE_OPTION = typer.Option("--config", metavar="FILE", help=f"A TOML file with settings; default: {CONFIG}.")
_SETTINGS_FILE = keyword("settings_file", Path | None, _FILE_OPTION, None)
_WORKER_OPTION = typer.Option("--worker", metavar="NAME", help=f"Worker section to apply; default: {WORKER}.")
_WORKER = keyword("worker", str | None, _WORKER_OPTION, None)
_DEBUG = keyword("debug", bool, typer.Option("--debug", help="Show the traceback of an error."), False)
