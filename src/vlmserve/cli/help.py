"""Help pages and usage errors of all commands, as plain text that cuts no names."""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
import typer.core
from pydantic import ValidationError

from vlmserve.cli.messages import WRONG_USE, report
from vlmserve.frontend.wire import DOCUMENT_ENDINGS, is_image_name
from vlmserve.settings.config import BUILT_IN_MODEL
from vlmserve.settings.validation import did_you_mean, problem_text, value_text

SHOW_ALL = "vlmserve.show_all"
"""Key of a command's context: show all flags."""

WIDEST = 120
"""Maximum columns of a help page."""

OTHER_VERBS = {
    "ps": "each server serves one model; vlmserve list shows downloaded models",
    "show": "vlmserve models and vlmserve list show models",
    "ls": "type vlmserve list",
    "stop": "press Ctrl-C in the terminal of vlmserve serve",
    "create": "vlmserve quantize and vlmserve merge-lora write checkpoints",
    "cp": "serve a model under another name with --served-model-name",
    "push": "upload a folder with hf upload",
    "download": "type vlmserve pull NAME",
    "remove": "type vlmserve rm NAME",
    "run-batch": "type vlmserve batch requests.jsonl --output results.jsonl",
    "complete": "type vlmserve ask",
    "generate": "type vlmserve ask",
    "collect-env": "vlmserve doctor describes this machine",
    "search": "vlmserve models lists short names; any Hugging Face id works too",
    "bench serve": "type vlmserve loadtest URL",
    "bench latency": "type vlmserve bench MODEL",
    "bench throughput": "type vlmserve bench MODEL",
}
"""Commands of Ollama, vLLM and other programs, with vlmserve's command."""

_UsageError: Any = typer.BadParameter.__base__
"""The parser's base error. Typer has its own copy of click and exports only this."""


@contextmanager
def usage_errors(context: Any) -> Iterator[None]:
    """Report a wrong command line in one red line, name the help, and exit."""
    try:
        yield
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        text = _usage_text(error, context)
        report(f"{text}{'' if text.endswith('?') else '.'} See {context.command_path} --help")
        raise typer.Exit(WRONG_USE) from None


def _usage_text(error: Any, context: Any) -> str:
    if (name := getattr(error, "option_name", None)) and hasattr(error, "possibilities"):
        flags = [flag for param in context.command.params for flag in (*param.opts, *param.secondary_opts)]
        return f"there is no flag {name}{did_you_mean(name, flags)}"
    if type(error) is not typer.BadParameter or error.param is None:
        text: str = error.format_message().strip().rstrip(".").replace(". Did you mean ", "; did you mean ")
        text = re.sub(r"^Got unexpected extra argument\S* \((.*)\)$", r"too many arguments: \1", text)
        return text[:1].lower() + text[1:]
    name = error.param_hint.strip("'\"") if isinstance(error.param_hint, str) else error.param.opts[-1]
    if isinstance(error.__cause__, ValidationError):
        [problem, *_] = error.__cause__.errors(include_url=False)
        return f"{name} {value_text(problem['input'])}: {problem_text(problem).rstrip('.')}"
    return f"{name}: {error.message}"


class Rare(str):
    """The heading of a flag in ``--help-all`` only."""


class _Page:
    """A help page. Lines break at spaces only."""

    def __init__(self, usage: str) -> None:
        self._width = min(shutil.get_terminal_size().columns, WIDEST)
        self.text = f"Usage: {usage}\n"

    def paragraphs(self, text: str) -> None:
        for paragraph in inspect.cleandoc(text).split("\n\n"):
            self.text += f"\n{self._wrap(' '.join(paragraph.split()), indent=2)}\n"

    def section(self, heading: str, rows: Sequence[tuple[str, str]]) -> None:
        """Write names and meanings; long names get their own lines."""
        column = min(max(len(name) for name, _ in rows) + 4, self._width * 2 // 5)
        self.text += f"\n{heading}:\n"
        for name, meaning in rows:
            lines = self._wrap(meaning, column).lstrip()
            beside = len(name) + 4 <= column
            self.text += f"  {name.ljust(column - 2)}{lines}\n" if beside else f"  {name}\n{' ' * column}{lines}\n"

    def _wrap(self, text: str, indent: int) -> str:
        indentation = " " * indent
        return textwrap.fill(
            text, self._width, initial_indent=indentation, subsequent_indent=indentation,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip


class HelpfulCommand(typer.core.TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Exits with status 2 for a wrong line."""
        with usage_errors(ctx):
            return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write usage, arguments and grouped flags; `--help` omits rare ones."""
        visible: Iterable[Any] = self.get_params(ctx)
        params = [param for param in visible if not getattr(param, "hidden", False)]
        page = _Page(" ".join((ctx.command_path, "[OPTIONS]", *_arguments(params))))
        page.paragraphs(self.help or "")
        groups: dict[str, list[tuple[str, str]]] = {}
        hidden = 0
        for param in params:
            is_argument = param.param_type_name == "argument"
            group = getattr(param, "rich_help_panel", None) or ("Arguments" if is_argument else "Options")
            if isinstance(group, Rare) and SHOW_ALL not in ctx.meta:
                hidden += 1
                continue
            _, meaning = param.get_help_record(ctx)
            name = param.metavar or param.name.upper() if is_argument else _flag_text(param)
            groups.setdefault(group, []).append((name, " ".join(meaning.split())))
        for group, rows in groups.items():
            page.section(group, rows)
        if hidden:
            page.paragraphs(f"{ctx.command_path} --help-all shows {hidden} more flags.")
        formatter.write(page.text)


def _arguments(params: Iterable[Any]) -> Iterator[str]:
    for param in params:
        if param.param_type_name == "argument":
            name = param.metavar or param.name.upper()
            yield name if param.required or param.metavar else f"[{name}]"


def _flag_text(param: Any) -> str:
    """``-m, --model TEXT`` or ``--stream / --no-stream``."""
    names = ", ".join(sorted(param.opts, key=len))
    if param.secondary_opts:
        return f"{names} / {', '.join(param.secondary_opts)}"
    return names if param.is_flag else f"{names} {param.metavar or 'TEXT'}"


class HelpfulGroup(typer.core.TyperGroup):
    """Shows commands with whole sentences."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Exits with status 2 for a wrong line. ``help COMMAND`` means ``COMMAND --help``."""
        if ctx.parent is None and args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        with usage_errors(ctx):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Exits with status 2 for an unknown command."""
        if ctx.parent is None and (text := self._correction(args)):
            report(text)
            raise typer.Exit(WRONG_USE)
        with usage_errors(ctx):
            return super().resolve_command(ctx, args)

    def _correction(self, args: Sequence[str]) -> str:
        """For another program's command, and a file or model in the place of a command; else empty."""
        for verb in (" ".join(args[:2]), args[0]):
            if verb in OTHER_VERBS and verb not in self.commands:
                return f"there is no command {verb}: {OTHER_VERBS[verb]}"
        word = args[0]
        if is_image_name(word) or word.lower().endswith(DOCUMENT_ENDINGS):
            return f'there is no command {word}: to ask about it, type vlmserve ask {word} "What is this?"'
        if word == BUILT_IN_MODEL or any(sign in word for sign in "/:."):
            return f"there is no command {word}: to use the model, type vlmserve serve {word} or vlmserve run {word}"
        return ""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        page = _Page(f"{ctx.command_path} COMMAND [OPTIONS]")
        page.paragraphs(self.help or "")
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, command in commands.items():
            if command is not None and not command.hidden:
                meaning = " ".join((command.help or "").partition("\n\n")[0].split())
                sections.setdefault(getattr(command, "rich_help_panel", None) or "Commands", []).append((name, meaning))
        for heading, rows in sections.items():
            page.section(heading, rows)
        params: list[Any] = self.get_params(ctx)
        page.section("Options", [(_flag_text(param), param.help) for param in params])
        page.paragraphs(f"{ctx.command_path} COMMAND --help shows the arguments of a command.")
        formatter.write(page.text)


def group(**settings: Any) -> typer.Typer:
    return typer.Typer(
        cls=HelpfulGroup, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, **settings
    )


def _show_all(context: typer.Context, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        context.meta[SHOW_ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit


def keyword(name: str, kind: Any, option: Any, default: Any) -> inspect.Parameter:
    """A parameter of a command. option: its flag."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


_HELP_ALL = typer.Option(
    "--help-all", is_eager=True, expose_value=False, callback=_show_all, help="Show all flags and exit."
)
HELP_ALL_PARAMETER = keyword("help_all", bool, _HELP_ALL, False)
