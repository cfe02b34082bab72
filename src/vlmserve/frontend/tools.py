"""Tool calls: how tools are described to the model, how it writes calls, and the grammar that enforces this."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from vlmserve.errors import InvalidRequestError
from vlmserve.frontend.tool_arguments import ArgumentsReader, JSONArguments
from vlmserve.prompt.template import ChatTemplate, ImagePart, Message, Part, VideoPart
from vlmserve.sampling.schemas import UNBOUNDED, JSONBounds, any_object, guided_schema
from vlmserve.types import Grammar


@dataclass(frozen=True)
class Function:
    """A function that can be called. parameters: a JSON schema of its arguments, None for none. strict: unsupported
    keywords in it are refused instead of ignored."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of its arguments, which are an object whatever else it says."""
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {**self.parameters, "type": "object"}

    def described(self) -> dict[str, Any]:
        """As OpenAI and chat templates write it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": {**function, "parameters": self.schema}}


@dataclass(frozen=True)
class ToolUse:
    """What an answer may do with functions.

    must_call: whether it has to call one. parallel: whether it may call more than one. allowed: the names of those that
    it may call, of all that the prompt describes; None: all.
    """

    functions: tuple[Function, ...]
    must_call: bool = False
    parallel: bool = True
    allowed: frozenset[str] | None = None

    @property
    def callable(self) -> Sequence[Function]:
        if self.allowed is None:
            return self.functions
        return [function for function in self.functions if function.name in self.allowed]


@dataclass(frozen=True)
class ToolForm:
    """How a model writes calls of functions: each is JSON with `name` and the arguments under `key`.

    trigger: what the first call begins with; empty where an answer's first character decides. opening, closing:
    around all calls, after the trigger. prefix, suffix: around each. separator: between two. special_ids: the special
    tokens that are in these, each with its id. native: whether the chat template describes functions and writes calls
    itself. call_id_length: of the ids of calls that the template accepts. bounds: of what schemas leave open.
    """

    name: str
    key: str
    trigger: str = ""
    opening: str = ""
    closing: str = ""
    prefix: str = ""
    suffix: str = ""
    separator: str = ""
    special_ids: Mapping[str, int] = field(default_factory=dict)
    native: bool = True
    call_id_length: int | None = None
    bounds: JSONBounds = UNBOUNDED

    call_start: ClassVar[str] = "{"
    """What a call begins with. Nothing of it is in what stands around calls."""
    marks: ClassVar[tuple[str, ...]] = ()
    """Texts inside of calls that may be special tokens."""

    def head(self, function: Function) -> str:
        """What stands before a function's arguments."""
        return f'{{"name": {json.dumps(function.name)}, "{self.key}": '

    def wrapped(self, call: str) -> str:
        """A call as the only one of an answer."""
        return f"{self.trigger}{self.opening}{self.prefix}{call}{self.suffix}{self.closing}"

    def written(self, name: str, arguments: dict[str, Any]) -> str:
        """A call as the only one of an answer."""
        return self.wrapped(json.dumps({"name": name, self.key: arguments}, ensure_ascii=False))

    @property
    def example(self) -> str:
        """A call as it is described to a model that does not know the form."""
        return f'{{"name": <function>, "{self.key}": <object>}}'

    def reader(self, function: Function) -> ArgumentsReader:
        """What reads the arguments of a call of a function, behind the call's head."""
        return JSONArguments()

    def call_rules(self, name: str, function: Function) -> list[str]:
        """The rule of that name, for a call of a function, and those that it needs. Raises InvalidRequestError."""
        # An agent writes whole files in a string.
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
        """Special tokens that have to be seen in an answer's text."""
        return frozenset(self.special_ids.values())

    def grammar(self, use: ToolUse, answer: Grammar | None) -> Grammar:
        """The grammar of an answer that may call functions, and otherwise has the format `answer`.

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
        """What stands around calls, in Lark: each special token in it may also be spelled."""
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
        # A special token ends the text before it, which need not be lazy.
        token = f" | TEXT <[{self.special_ids[self.trigger]}]> calls" if self.trigger in self.special_ids else ""
        return f"TEXT | begun calls{token}"

    def blame(self, use: ToolUse) -> list[Grammar]:
        """A grammar for each function's arguments, which names where they came from."""
        return [
            Grammar("json_schema", json.dumps(function.schema), function.strict, f"tools[{index}].function.parameters")
            for index, function in enumerate(use.functions)
        ]


def for_template(
    template: ChatTemplate, messages: Sequence[Message], form: ToolForm, use: ToolUse | None
) -> Sequence[Message]:
    """Messages with calls, results and instructions as a chat template takes them. use: what the model may call."""
    if not form.native:
        return _with_instructions(messages, form, use)
    if not template.shows_images_in_results:
        messages = _with_images_after(messages)
    return messages if form.call_id_length is None else _with_short_ids(messages, form.call_id_length)


def _with_instructions(messages: Sequence[Message], form: ToolForm, use: ToolUse | None) -> list[Message]:
    """Messages for a chat template that knows no functions: calls, results and instructions as ordinary text."""
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
    """Messages for a chat template that writes results, but only their text: their images come right after them, in
    order, at the beginning of what the user says then. A number says what belongs where."""
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
    """Messages for a chat template that takes ids of calls of that length only: the last characters of longer ones."""
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
    """A message of the user in which texts that follow each other are one."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, str) and isinstance(last, str):
            joined[-1] = last + part
        else:
            joined.append(part)
    return Message("user", tuple(joined), is_string=len(joined) == 1 and isinstance(joined[0], str))


def _followed(results: Message, message: Message) -> Message:
    """Results and what the user says then as one message: many templates want the roles to alternate."""
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
    """The turns with instructions at the end of the first system message, or in one before all turns."""
    first = turns[0]
    if first.role != "system":
        return [Message("system", (text,), is_string=True), *turns]
    if first.is_string:
        return [replace(first, parts=("\n\n".join([*map(str, first.parts), text]),)), *turns[1:]]
    return [replace(first, parts=(*first.parts, f"\n\n{text}")), *turns[1:]]


def literal(text: str) -> str:
    """A literal in Lark."""
    return json.dumps(text) if text else ""


def guided(schema: dict[str, Any], strict: bool, source: str, bounds: JSONBounds) -> dict[str, Any]:
    """A schema as grammars take it. source: the field that has it. Raises InvalidRequestError."""
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
