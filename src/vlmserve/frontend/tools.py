"""Tool calls: their descriptions in prompts, the model's form, and the grammar that enforces it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, Self

from vlmserve.errors import InvalidRequestError
from vlmserve.prompt.template import ChatTemplate, ImagePart, Message, Part, VideoPart
from vlmserve.sampling.schemas import UNBOUNDED, JSONBounds, any_object, guided_schema
from vlmserve.types import Grammar


@dataclass(frozen=True)
class Function:
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of its arguments."""
    strict: bool = False
    """Reject unsupported schema keywords instead of ignoring them."""

    @property
    def schema(self) -> dict[str, Any]:
        """The arguments are always an object."""
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {**self.parameters, "type": "object"}

    def described(self) -> dict[str, Any]:
        """OpenAI's form, which chat templates take."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": {**function, "parameters": self.schema}}


@dataclass(frozen=True)
class ToolUse:
    functions: tuple[Function, ...]
    must_call: bool = False
    """At least one call."""
    parallel: bool = True
    """Several calls are allowed."""
    allowed: frozenset[str] | None = None
    """Names of the tools that may be called; None: all in the prompt."""

    @property
    def callable(self) -> Sequence[Function]:
        if self.allowed is None:
            return self.functions
        return [function for function in self.functions if function.name in self.allowed]


@dataclass(frozen=True)
class ToolForm:
    """How a model writes tool calls: each is JSON with `name` and the arguments under `key`."""

    name: str
    key: str
    trigger: str = ""
    """Begins the first call; empty if the answer's first character decides."""
    opening: str = ""
    """Before all calls, after the trigger."""
    closing: str = ""
    """After all calls."""
    prefix: str = ""
    """Before each call."""
    suffix: str = ""
    """After each call."""
    separator: str = ""
    """Between two calls."""
    special_ids: Mapping[str, int] = field(default_factory=dict)
    """Special tokens in these texts, with their ids."""
    native: bool = True
    """The chat template describes tools and writes calls itself."""
    call_id_length: int | None = None
    """Length of call ids that the template accepts."""
    bounds: JSONBounds = UNBOUNDED
    """Limits for schemas that set none."""

    call_start: ClassVar[str] = "{"
    """First text of a call; occurs nowhere around calls."""
    marks: ClassVar[tuple[str, ...]] = ()
    """Texts inside calls that may be special tokens."""

    def head(self, function: Function) -> str:
        return f'{{"name": {json.dumps(function.name)}, "{self.key}": '

    def wrapped(self, call: str) -> str:
        return f"{self.trigger}{self.opening}{self.prefix}{call}{self.suffix}{self.closing}"

    def written(self, name: str, arguments: dict[str, Any]) -> str:
        return self.wrapped(json.dumps({"name": name, self.key: arguments}, ensure_ascii=False))

    @property
    def example(self) -> str:
        """A call for a model that does not know the form."""
        return f'{{"name": <function>, "{self.key}": <object>}}'

    def reader(self, function: Function) -> ArgumentsReader:
        """Return a reader of the text after the call's head."""
        return JSONArguments()

    def call_rules(self, name: str, function: Function) -> list[str]:
        """The rule `name` for a call, and the rules it needs. Raises InvalidRequestError."""
        # agents write whole files in a string
        schema = guided(function.schema, function.strict, "tools", replace(self.bounds, length=0))
        return [
            f'{name}: {literal(self.head(function))} arguments_{name} "}}"',
            f"arguments_{name}: %json {json.dumps(schema)}",
        ]

    def with_special(self, tokens: Mapping[str, int]) -> Self:
        around = (self.trigger, self.opening, self.closing, self.prefix, self.suffix, self.separator, *self.marks)
        found = {token: id_ for token, id_ in tokens.items() if token and any(token in text for text in around)}
        return replace(self, special_ids=found)

    @property
    def shown_ids(self) -> frozenset[int]:
        """Special tokens that must stay visible in answers."""
        return frozenset(self.special_ids.values())

    def grammar(self, use: ToolUse, answer: Grammar | None) -> Grammar:
        """The grammar of an answer that either calls tools or has the format `answer`.

        Raises InvalidRequestError if `answer` cannot be combined with calls.
        """
        calls = use.callable
        rules = ["%llguidance {}", f"start: {self._start(use, answer)}"]
        end = self._around(self.suffix)
        again = f"({self._around(self.separator + self.prefix)} call {end})*" if use.parallel else ""
        rules.append(
            f"calls: {self._around(self.opening + self.prefix)} call {end} {again} {self._around(self.closing)}"
        )
        rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(calls))))
        for index, function in enumerate(calls):
            rules += self.call_rules(f"call_{index}", function)
        rules.append(r"TEXT: /(.|\n)*/")
        rules.append(r"PLAIN: /([^{](.|\n)*)?/")
        if self.trigger:
            rules.append(f"trigger: {self._around(self.trigger)}")
            rules.append(f"begun[lazy]: TEXT {literal(self.trigger)}")
        if answer is not None:
            rules.append(f"answer: {_embedded(answer, self.bounds)}")
        return Grammar("lark", "\n".join(rules), source="tools")

    def _around(self, text: str) -> str:
        """Lark of text around calls; its special tokens may be spelled with ordinary tokens."""
        longest_first = sorted(self.special_ids, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})", text)
        return " ".join(
            f"({literal(part)} | <[{self.special_ids[part]}]>)" if part in self.special_ids else literal(part)
            for part in parts
        )

    def _start(self, use: ToolUse, answer: Grammar | None) -> str:
        begun = "trigger calls" if self.trigger else "calls"
        if use.must_call:
            return begun
        if answer is not None:
            return f"{begun} | answer"
        if not self.trigger:
            return "calls | PLAIN"
        # A special token ends the text before it, so text need not be lazy.
        token = f" | TEXT <[{self.special_ids[self.trigger]}]> calls" if self.trigger in self.special_ids else ""
        return f"TEXT | begun calls{token}"

    def blame(self, use: ToolUse) -> list[Grammar]:
        """One grammar for each function, so that errors can name the tool."""
        return [
            Grammar("json_schema", json.dumps(function.schema), function.strict, f"tools[{index}].function.parameters")
            for index, function in enumerate(use.functions)
        ]


def for_template(
    template: ChatTemplate, messages: Sequence[Message], form: ToolForm, use: ToolUse | None
) -> Sequence[Message]:
    """Messages as a chat template takes them. use: tools the model may call."""
    if not form.native:
        return _with_instructions(messages, form, use)
    if not template.shows_images_in_results:
        messages = _with_images_after(messages)
    return messages if form.call_id_length is None else _with_short_ids(messages, form.call_id_length)


def _with_instructions(messages: Sequence[Message], form: ToolForm, use: ToolUse | None) -> list[Message]:
    """Write calls, results and instructions as ordinary text."""
    turns: list[Message] = []
    after_result = False
    for message in messages:
        if message.tool_calls:
            calls = (form.written(call.name, call.arguments) for call in message.tool_calls)
            text = "\n".join([*(part for part in message.parts if isinstance(part, str) and part), *calls])
            turns.append(Message("assistant", (text,), is_string=True, reasoning=message.reasoning))
        elif message.role == "tool":
            result = _user("<tool_response>\n", *message.parts, "\n</tool_response>")
            turns.append(_followed(turns.pop(), result) if after_result else result)
        elif message.role == "user" and after_result:
            turns.append(_followed(turns.pop(), message))
        else:
            turns.append(message)
        after_result = message.role == "tool"
    return turns if use is None else _instructed(turns, _instructions(form, use))


def _with_images_after(messages: Sequence[Message]) -> list[Message]:
    """Move images of tool results to the next user message, with numbers, for templates that write only results'
    text.
    """
    turns: list[Message] = []
    shown: list[Part] = []
    count = 0
    for message in messages:
        if message.role == "tool":
            texts: list[str] = []
            for part in message.parts:
                if isinstance(part, str):
                    texts.append(part)
                else:
                    count += 1
                    texts.append(f"[{_kind(part)} {count}]")
                    shown += [texts[-1], part]
            turns.append(replace(message, parts=("\n".join(texts),), is_string=True))
            continue
        if shown and message.role == "user":
            turns.append(Message("user", (*shown, *message.parts)))
        else:
            turns += [*([Message("user", tuple(shown))] if shown else []), message]
        shown = []
    return [*turns, *([Message("user", tuple(shown))] if shown else [])]


def _with_short_ids(messages: Sequence[Message], length: int) -> list[Message]:
    """Some templates accept only the last `length` characters of call ids."""
    return [
        replace(
            message,
            tool_calls=tuple(replace(call, id=call.id[-length:]) for call in message.tool_calls),
            tool_call_id=message.tool_call_id and message.tool_call_id[-length:],
        )
        for message in messages
    ]


def _kind(part: ImagePart | VideoPart) -> str:
    return "image" if isinstance(part, ImagePart) else "video"


def _user(*parts: Part) -> Message:
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, str) and isinstance(last, str):
            joined[-1] = last + part
        else:
            joined.append(part)
    return Message("user", tuple(joined), is_string=len(joined) == 1 and isinstance(joined[0], str))


def _followed(results: Message, message: Message) -> Message:
    """Merge results with the user's next message: many templates want alternating roles."""
    if message.is_string:
        return _user(*results.parts, "\n", *message.parts)
    return Message("user", (*_user(*results.parts, "\n").parts, *message.parts))


def _instructions(form: ToolForm, use: ToolUse) -> str:
    described = "\n".join(
        json.dumps(function.described()["function"], ensure_ascii=False) for function in use.functions
    )
    return (
        f"You can call functions. Each line describes one, its arguments as a JSON schema:\n{described}\n\n"
        f"To call one, answer in exactly this form and wait for its result:\n{form.wrapped(form.example)}"
    )


def _instructed(turns: list[Message], text: str) -> list[Message]:
    first = turns[0]
    if first.role != "system":
        return [Message("system", (text,), is_string=True), *turns]
    if first.is_string:
        return [replace(first, parts=("\n\n".join([*map(str, first.parts), text]),)), *turns[1:]]
    return [replace(first, parts=(*first.parts, f"\n\n{text}")), *turns[1:]]


def literal(text: str) -> str:
    return json.dumps(text) if text else ""


def guided(schema: dict[str, Any], strict: bool, source: str, bounds: JSONBounds) -> dict[str, Any]:
    """source: the field that errors name. Raises InvalidRequestError."""
    try:
        return guided_schema(schema, strict=strict, bounds=bounds, combine=False)
    except ValueError as error:
        raise InvalidRequestError(f"{source}: {error}", param=source) from None


def _embedded(answer: Grammar, bounds: JSONBounds) -> str:
    """A grammar as part of another one."""
    if answer.kind == "json_object":
        return "%json " + json.dumps(any_object(bounds))
    if answer.kind == "json_schema":
        try:
            schema = json.loads(answer.text)
        except ValueError as error:
            raise InvalidRequestError(f"{answer.source}: {error}", param=answer.source) from None
        schema = schema if isinstance(schema, dict) else {}
        return "%json " + json.dumps(guided(schema, answer.strict, answer.source, bounds))
    if answer.kind == "choice":
        return " | ".join(map(json.dumps, json.loads(answer.text)))
    raise InvalidRequestError(
        f"{answer.source} cannot be combined with tools that the model may but need not call; use a JSON schema, or "
        "set tool_choice to none or required",
        param=answer.source,
    )


class ArgumentsReader(Protocol):
    def push(self, text: str) -> tuple[str, str | None]:
        """Return new JSON, and the text after the arguments; None while they have not ended."""


class JSONArguments:
    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def push(self, text: str) -> tuple[str, str | None]:
        end = next((place for place, character in enumerate(text, 1) if self._ends_with(character)), None)
        return (text, None) if end is None else (text[:end], text[end:])

    def _ends_with(self, character: str) -> bool:
        """Add a character; return whether it ends the JSON object."""
        if self._escaped:
            self._escaped = False
        elif self._in_string:
            self._escaped = character == "\\"
            self._in_string = character != '"'
        elif character == '"':
            self._in_string = True
        else:
            self._depth += (character in "{[") - (character in "}]")
            return character == "}" and self._depth == 0
        return False


def overlap(text: str, beginning: str) -> int:
    """Length of the longest end of `text` that starts `beginning`."""
    return next((n for n in range(min(len(text), len(beginning)), 0, -1) if text.endswith(beginning[:n])), 0)
