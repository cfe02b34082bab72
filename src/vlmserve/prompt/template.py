"""Renders messages with a jinja chat template (https://huggingface.co/docs/transformers/chat_templating_writing)."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from vlmserve.errors import ConfigurationError, InvalidRequestError, ModelLoadError
from vlmserve.prompt.probes import Probes
from vlmserve.prompt.template_limits import LimitedEnvironment, SlowRenderingError, TemplateLimits
from vlmserve.prompt.untrusted import END_MARK

_OURS = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables that only the request sets."""
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names of an earlier answer's reasoning in chat templates and requests."""
_BREAK = "\n\n"
"""Separator of joined messages."""
Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class ImagePart:
    """inline: it belongs to the text around it, even if the template moves images before texts."""

    inline: bool = False


@dataclass(frozen=True)
class VideoPart:
    """A video in a message."""


Part = str | ImagePart | VideoPart


@dataclass(frozen=True)
class ToolCall:
    """arguments: decoded JSON."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Message:
    role: Role
    parts: tuple[Part, ...]
    """Texts, images and videos in order."""
    is_string: bool = False
    """The content was a string, not parts."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Function calls of the assistant."""
    tool_call_id: str | None = None
    """The call whose result this is."""
    name: str | None = None
    """The function whose result this is."""
    reasoning: str | None = None
    """Reasoning of the assistant."""


def read_template(source: str) -> str:
    """Read a path, or return a template. Raises ConfigurationError for an unreadable file."""
    if "{" in source:
        return source
    try:
        return Path(source).read_text("utf-8-sig")
    except OSError as error:
        raise ConfigurationError(f"--chat-template {source}: the file cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"--chat-template {source}: the file is not text in UTF-8") from error


class ChatTemplate:
    """`Probes` finds out which roles and content this template shows, and `render` rearranges messages so that it shows
    all of their text.

    Raises ModelLoadError for a template that does not compile.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], image_token: str | None, video_token: str | None = None
    ) -> None:
        """image_token, video_token: the template's text for an image and a video."""
        environment = _environment()
        self._limits = TemplateLimits()
        try:
            with self._limits.apply():
                self._template = environment.from_string(source)
                parsed = environment.parse(source)
            known = meta.find_undeclared_variables(parsed)
            # such as the placeholder between other tokens
            sets_image_token = any(
                name.name == "image_token" and name.ctx == "store" for name in parsed.find_all(nodes.Name)
            )
            self.knows_tools = "tools" in known
            # Rendering copies the globals, and jinja's layers are slow to copy.
            self._template.globals = dict(self._template.globals)
        except (jinja2.TemplateError, RecursionError, SyntaxError, OverflowError, ValueError) as error:
            raise ModelLoadError(f"the checkpoint's chat template does not compile: {error!s:.80}") from error
        self.source = source
        self._reasoning_names = tuple(name for name in REASONING_FIELDS if re.search(rf"\b{name}\b", source))
        self._variables = dict(special_tokens)
        self.settings = frozenset(known - {*_OURS, *environment.globals, *special_tokens, "image_token"})
        """Variables that a request may set, such as ``enable_thinking``."""
        self._image_token = image_token
        self._video_token = video_token
        if image_token is not None and not sets_image_token:
            self._variables.setdefault("image_token", image_token)
        self._probes = Probes(lambda chat: self._render(chat, add_generation_prompt=True), image_token)
        self.shows_images_in_results = self._probes.shows_images_in_results
        self._splits_thoughts = self._probes.takes_thoughts_with_calls(self._reasoning_names)
        self._thinks_in_parts = "thinking" in self._reasoning_names and self._probes.takes_thinking_parts()

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        settings: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """Render a prompt.

        tools: functions in OpenAI's format, for a template that `knows_tools`. settings: values by name; unknown names
        have no effect. continue_final_message: end with the text of the last message.

        Raises InvalidRequestError for rejected messages and settings of reserved names, SlowRenderingError within
        `only_quick`.
        """
        for name in settings or ():
            if name in _OURS or name in self._variables:
                raise InvalidRequestError(
                    f"chat_template_kwargs cannot set {name}, which the request itself sets",
                    param="chat_template_kwargs",
                )
        if continue_final_message:
            messages = [*messages[:-1], _with_end(messages[-1])]
        try:
            chat = [
                {**_beside_content(message), **self._reasoning(message), "content": self._content(message)}
                for message in self._arranged(messages)
            ]
            text = self._render(
                chat,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                tools=tools,
                settings=settings or {},
            )
        except SlowRenderingError:
            raise
        except Exception as error:  # expressions of a template can raise anything
            raise InvalidRequestError(
                f"the model's chat template does not accept these messages: {error}{_without_a_call(messages)}",
                param="messages",
            ) from error
        if not continue_final_message:
            return text
        before, mark, _ = text.rpartition(END_MARK)
        if not mark:
            raise InvalidRequestError(
                "the model's chat template does not show the last message, so that it cannot be continued",
                param="continue_final_message",
            )
        return before

    def _arranged(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Rearrange roles so that the template shows all messages."""
        if not self._places_systems(messages):
            messages = self._with_one_system(messages)
        if _begins_with_assistant(messages) and not self._probes.takes_assistant_first():
            messages = _with_user_first(messages)
        if not self._probes.takes_neighbours:
            messages = _joined(messages)
        return messages if self._splits_thoughts else [_with_thoughts_first(message) for message in messages]

    def _places_systems(self, messages: Sequence[Message]) -> bool:
        places = [place for place, message in enumerate(messages) if message.role == "system"]
        if not places:
            return True
        if len(places) == len(messages):
            return self._probes.takes_lone_system and (len(places) == 1 or self._probes.takes_systems)
        return self._probes.takes_systems or (self._probes.takes_system and places == [0])

    def _with_one_system(self, messages: Sequence[Message]) -> list[Message]:
        """Join system messages into the first, or into the user's without a system role.

        A system message with an image becomes a user message in place.
        """
        others = [
            replace(message, role="user") if message.role == "system" else message
            for message in messages
            if message.role != "system" or _has_media(message)
        ]
        texts = [message for message in messages if message.role == "system" and not _has_media(message)]
        if not texts:
            return others
        system = texts[0]
        for message in texts[1:]:
            system = _followed(system, message)
        has_user = any(message.role == "user" for message in others)
        if self._probes.takes_system and has_user:
            return [system, *others]
        instructions = replace(system, role="user")
        if others and others[0].role == "user":
            return [_followed(instructions, others[0]), *others[1:]]
        return [instructions, *others]

    def _reasoning(self, message: Message) -> dict[str, str]:
        if message.reasoning is None or self._thinks_in_parts:
            return {}
        return dict.fromkeys(self._reasoning_names, message.reasoning)

    def _content(self, message: Message) -> str | list[dict[str, str]]:
        """The content in a form that the template shows completely."""
        if self._thinks_in_parts and message.reasoning is not None:
            thinking = {"type": "thinking", "thinking": message.reasoning}
            return [thinking, *(_typed(self._text(part)) for part in message.parts if part != "")]
        form = self._probes.form(message.role)
        if _has_media(message) and self._probes.takes_images:
            return [_typed(self._text(part) if self._is_text(part) else part) for part in message.parts]
        texts = [self._text(part) for part in message.parts]
        if form.parts and not form.strings:
            return [_typed(text) for text in texts]
        text = ("\n" if _has_media(message) else form.separator).join(texts)
        return [_typed(text)] if form.one_part and not form.strings else text

    def _text(self, part: Part) -> str:
        if isinstance(part, str):
            return part
        return (self._image_token if isinstance(part, ImagePart) else self._video_token) or ""

    def _is_text(self, part: Part) -> bool:
        return self._probes.moves_images and isinstance(part, ImagePart) and part.inline

    def _render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        with self._limits.apply():
            return self._template.render(
                **{
                    **{name: value for name, value in settings.items() if name in self.settings},
                    **self._variables,
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                    "tools": tools,
                    "documents": None,
                }
            )


def _with_end(message: Message) -> Message:
    *parts, last = message.parts
    return replace(message, parts=(*parts, f"{last}{END_MARK}"))


def _begins_with_assistant(messages: Sequence[Message]) -> bool:
    return next((message.role for message in messages if message.role != "system"), None) == "assistant"


def _with_user_first(messages: Sequence[Message]) -> list[Message]:
    place = next(place for place, message in enumerate(messages) if message.role != "system")
    return [*messages[:place], Message("user", ("",), is_string=True), *messages[place:]]


def _has_media(message: Message) -> bool:
    return any(not isinstance(part, str) for part in message.parts)


def _followed(first: Message, second: Message) -> Message:
    """Join two messages; the first one's role stays."""
    if not any(first.parts) or not any(second.parts):
        parts = first.parts if any(first.parts) else second.parts
    elif isinstance(first.parts[-1], str) and isinstance(second.parts[0], str):
        parts = (*first.parts[:-1], f"{first.parts[-1]}{_BREAK}{second.parts[0]}", *second.parts[1:])
    else:
        parts = (*first.parts, *second.parts)
    thoughts = [message.reasoning for message in (first, second) if message.reasoning is not None]
    return replace(first, parts=parts, tool_calls=second.tool_calls, reasoning=_BREAK.join(thoughts) or None)


def _joined(messages: Sequence[Message]) -> list[Message]:
    turns: list[Message] = []
    for message in messages:
        last = turns[-1] if turns else None
        if last is not None and last.role == message.role != "tool" and not last.tool_calls:
            turns[-1] = _followed(last, message)
        else:
            turns.append(message)
    return turns


def _with_thoughts_first(message: Message) -> Message:
    """Move text before calls to the end of the reasoning, if there is any."""
    if message.reasoning is None or not message.tool_calls or not any(message.parts) or _has_media(message):
        return message
    return replace(message, parts=("",), reasoning=_BREAK.join((message.reasoning, *map(str, message.parts))))


def _typed(part: Part) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image" if isinstance(part, ImagePart) else "video"}


def _beside_content(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role}
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    named = {"tool_call_id": message.tool_call_id, "name": message.name}
    return fields | {name: value for name, value in named.items() if value is not None}


def _without_a_call(messages: Sequence[Message]) -> str:
    """A hint why a template rejects messages: it needs the function of each result."""
    unknown = [message.tool_call_id for message in messages if message.role == "tool" and message.name is None]
    return f"; no call before its result has the id {unknown[0]!r:.100}" if unknown else ""


class _GenerationBlocks(Extension):
    """``{% generation %}`` marks text for training."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> LimitedEnvironment:
    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.guard()
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
