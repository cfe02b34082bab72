"""Translates flags of vLLM and llama.cpp, before parsing, and vLLM's notations for lists and JSON."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import typer
import typer.core

from vlmserve.cli.fields import flag
from vlmserve.cli.help import HelpfulCommand
from vlmserve.cli.messages import WRONG_USE, note, report
from vlmserve.errors import ConfigurationError
from vlmserve.settings.base import parse_list
from vlmserve.settings.llama_flags import LLAMA_FLAGS, MODEL_FLAGS
from vlmserve.settings.vllm_flags import FLAGS, VALUES, Entry, Missing, Renamed, Unused

WRITTEN = "vlmserve.written"
"""Key of a command's context: the flags typed, by field name."""


@dataclass
class CommandLine:
    """written: by field, the flag as typed. notes: for the person."""

    words: list[str] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Spelling:
    """Translates one command's lines."""

    switches: Collection[str]
    """Flags without a value."""
    values: Collection[str]
    lists: Collection[str]
    """Repeatable flags."""
    num_arguments: int | None
    """Words besides flags; None: any number."""
    takes_model: bool = False

    def read(self, words: Sequence[str]) -> CommandLine:
        """Translate a line; keep unknown words. Raises ConfigurationError."""
        line = CommandLine()
        keys: dict[str, dict[str, Any]] = {}
        rest = list(words)
        num_arguments = 0
        while rest:
            word = rest.pop(0)
            if word == "--":
                line.words += [word, *rest]
                break
            name, equals, value = self._split(word)
            if not word.startswith("-") or word == "-":
                num_arguments += 1
                line.words.append(word)
            elif self._is_own(name):
                line.written[_field(self._positive(name))] = name
                self._add(line, name, [value] if equals else self._take(name, rest, num_arguments))
            elif "." in name and self._knows(name.partition(".")[0]):
                base, _, key = name.partition(".")
                _put(keys.setdefault(base, {}), name, key.split("."), value if equals else _next(name, rest))
            elif name in MODEL_FLAGS and self.takes_model:
                num_arguments += 1
                line.words.append(value if equals else _next(name, rest))
            elif (entry := _entry(name)) is not None and self._applies(entry):
                self._translate(line, name, entry, value if equals else None, rest)
            elif isinstance(entry, Renamed) and entry.elsewhere:
                raise ConfigurationError(f"this command has no {name}. {entry.elsewhere}")
            else:
                line.words.append(word)
        for base, entries in keys.items():
            self._prepend(line, base, json.dumps(entries))
        return line

    def _split(self, word: str) -> tuple[str, str, str]:
        if not word.startswith("--"):
            return word, "", ""
        name, equals, value = word.partition("=")
        base, dot, key = name.partition(".")
        return base.replace("_", "-") + dot + key, equals, value

    def _is_own(self, name: str) -> bool:
        return name in self.switches or name in self.values or name in self.lists

    def _positive(self, name: str) -> str:
        positive = "--" + name.removeprefix("--no-")
        return positive if name.startswith("--no-") and positive in self.switches else name

    def _knows(self, base: str) -> bool:
        entry = FLAGS.get(base)
        return base in self.values or (isinstance(entry, Renamed) and self._applies(entry))

    def _applies(self, entry: Entry) -> bool:
        return not isinstance(entry, Renamed) or all(self._is_own(flag(name)) for name in entry.fields)

    def _take(self, name: str, rest: list[str], num_arguments: int) -> list[str]:
        """Words of one flag. A list flag takes several once the other arguments have come."""
        if name in self.switches or not rest:
            return []
        taken = [rest.pop(0)]
        if name in self.lists and self.num_arguments is not None and num_arguments >= self.num_arguments:
            while rest and not rest[0].startswith("-"):
                taken.append(rest.pop(0))
        return taken

    def _add(self, line: CommandLine, name: str, values: Iterable[str]) -> None:
        others = VALUES.get(_field(name), {})
        values = [others.get(value, value) for value in values]
        if not values:
            line.words.append(name)
        for value in values:
            line.words += [f"{name}={value}"] if name.startswith("--") else [name, value]

    def _prepend(self, line: CommandLine, base: str, value: str) -> None:
        """Insert at the front: the rest may end in words."""
        rest = line.words
        line.words = []
        if base in self.values:
            self._add(line, base, [value])
        else:
            self._translate(line, base, FLAGS[base], value, [])
        line.words += rest

    def _translate(self, line: CommandLine, name: str, entry: Entry, value: str | None, rest: list[str]) -> None:
        if isinstance(entry, Missing):
            raise ConfigurationError(f"vlmserve has no {name}. {entry.why}")
        if entry.is_switch and value is not None:
            raise ConfigurationError(f"{name} takes no value")
        if not entry.is_switch and value is None:
            value = _next(name, rest)
        if isinstance(entry, Unused):
            if entry.values and value not in entry.values:
                raise ConfigurationError(f"{name} {value}: {entry.otherwise}")
            line.notes.append(f"{name} changes nothing. {entry.why}")
            return
        own: Mapping[str, str] = entry.convert(value or "") if entry.convert else {entry.fields[0]: value or ""}
        for target, converted in own.items():
            line.written[target] = name
            if flag(target) in self.switches:
                line.words.append(flag(target if converted == "true" else f"no_{target}"))
            else:
                self._add(line, flag(target), parse_list(converted) if flag(target) in self.lists else [converted])


def _entry(name: str) -> Entry | None:
    return FLAGS.get(name) or LLAMA_FLAGS.get(name)


def _field(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def _next(name: str, rest: list[str]) -> str:
    if not rest:
        raise ConfigurationError(f"{name} needs a value")
    return rest.pop(0)


def _put(entries: dict[str, Any], name: str, path: Sequence[str], text: str) -> None:
    """Set a key of nested JSON; parse the value if possible."""
    for key in path[:-1]:
        entries = entries.setdefault(key, {})
        if not isinstance(entries, dict):
            raise ConfigurationError(f"{name}: a part of this name has a value already; give only one of them")
    try:
        entries[path[-1]] = json.loads(text)
    except ValueError:
        entries[path[-1]] = text


class SettingsCommand(HelpfulCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Exits with status 2 for a flag without a counterpart."""
        if ctx.resilient_parsing:  # a shell completes
            return super().parse_args(ctx, args)
        try:
            line = self._spelling().read(args)
        except ConfigurationError as error:
            report(str(error))
            raise typer.Exit(WRONG_USE) from None
        ctx.meta[WRITTEN] = line.written
        for text in line.notes:
            note(text)
        try:
            return super().parse_args(ctx, line.words)
        except typer.BadParameter as error:
            if error.param is not None and error.param.name in line.written:
                error.param_hint = repr(line.written[error.param.name])
            raise

    def _spelling(self) -> Spelling:
        options = [param for param in self.params if isinstance(param, typer.core.TyperOption)]
        arguments = [param for param in self.params if isinstance(param, typer.core.TyperArgument)]
        names = {option: [*option.opts, *option.secondary_opts] for option in options}
        switches = {name for option in options if option.is_flag for name in names[option]} | {"--help"}
        lists = {name for option in options if option.multiple for name in names[option]}
        values = {name for option in options for name in names[option]} - switches - lists
        fixed = all(argument.nargs == 1 for argument in arguments)
        takes_model = any(argument.name == "model" for argument in arguments)
        return Spelling(switches, values, lists, len(arguments) if fixed else None, takes_model)
