"""Chat messages to text, through the checkpoint's own jinja template, as transformers renders it.

https://huggingface.co/docs/transformers/chat_templating_writing
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vlmserve.errors import ConfigurationError, InvalidRequestError, ModelLoadError

_PROBE = "vlmserveprobe"
_OURS = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables that only the request itself sets."""
Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class ImagePart:
    """Where an image stands in a message. inline: it belongs to the text around it, even if the template puts images
    before texts."""

    inline: bool = False


@dataclass(frozen=True)
class VideoPart:
    """Where a video stands in a message."""


Part = str | ImagePart | VideoPart


@dataclass(frozen=True)
class ToolCall:
    """A function that the assistant has called, and its arguments as JSON has them."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Message:
    """One turn. parts: texts, images and videos in order. is_string: the content came as one string, not as parts.

    tool_calls: of the assistant. reasoning: what it thought before. tool_call_id, name: the call whose result this is,
    and the function.
    """

    role: Role
    parts: tuple[Part, ...]
    is_string: bool = False
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None


def read_template(source: str) -> str:
    """A chat template from the file of that path, or `source` itself if it is one.

    Raises ConfigurationError for a file that cannot be read.
    """
    if "{" in source:
        return source
    try:
        return Path(source).read_text("utf-8")
    except OSError as error:
        raise ConfigurationError(f"--chat-template {source}: the file cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"--chat-template {source}: the file is not text in UTF-8") from error


class ChatTemplate:
    """A compiled chat template.

    Templates differ in the content they expect: a string, or a list of typed parts. Which of them this one takes is
    found out once by rendering a probe; messages are then written in a form that it takes, the caller's own if it can.
    Raises ModelLoadError for a template that does not compile.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        image_token: str | None,
        video_token: str | None = None,
    ) -> None:
        """image_token, video_token: what the template writes for an image and for a video."""
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            parsed = environment.parse(source)
            known = meta.find_undeclared_variables(parsed)
            # A template may have a default of its own, such as the placeholder with tokens around it.
            sets_image_token = any(
                name.name == "image_token" and name.ctx == "store" for name in parsed.find_all(nodes.Name)
            )
            self.knows_tools = "tools" in known
            # Each rendering copies them, and jinja keeps them in layers that are slow to copy.
            self._template.globals = dict(self._template.globals)
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"the checkpoint's chat template does not compile: {error}") from error
        self.source = source
        self._knows_reasoning = "reasoning_content" in source
        self._variables = dict(special_tokens)
        self.settings = frozenset(known - {*_OURS, *environment.globals, *special_tokens, "image_token"})
        """Names of what a request may set, such as ``enable_thinking``."""
        self._image_token = image_token
        self._video_token = video_token
        if image_token is not None and not sets_image_token:
            self._variables.setdefault("image_token", image_token)
        self.takes_strings = self._probe(_PROBE) is not None
        self.takes_parts = self._probe([{"type": "text", "text": _PROBE}]) is not None
        with_image = self._probe([{"type": "image"}, {"type": "text", "text": _PROBE}])
        self.takes_system = self._probe_system()
        self.takes_images = bool(self.takes_parts and image_token and with_image and with_image.count(image_token) == 1)
        self._moves_images = self.takes_images and not self._probe_order()
        self.shows_images_in_results = self.takes_images and self._probe_result()

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. tools: functions, as OpenAI describes them, for a template that `knows_tools`. settings:
        values by name; those that are not among the template's `settings` have no effect.

        Raises InvalidRequestError if the template refuses the messages, and for settings of what is not theirs to set.
        """
        for name in settings or ():
            if name in _OURS or name in self._variables:
                raise InvalidRequestError(
                    f"chat_template_kwargs cannot set {name}, which the request itself sets",
                    param="chat_template_kwargs",
                )
        chat = [
            {**_beside_content(message), **self._reasoning(message), "content": self._content(message)}
            for message in messages
        ]
        try:
            return self._render(chat, add_generation_prompt=add_generation_prompt, tools=tools, settings=settings or {})
        except Exception as error:  # a template can fail with any error that its expressions can raise
            raise InvalidRequestError(
                f"the model's chat template does not accept these messages: {error}{_without_a_call(messages)}",
                param="messages",
            ) from error

    def _reasoning(self, message: Message) -> dict[str, str]:
        known = self._knows_reasoning and message.reasoning is not None
        return {"reasoning_content": message.reasoning or ""} if known else {}

    def _content(self, message: Message) -> str | list[dict[str, str]]:
        has_image = any(not isinstance(part, str) for part in message.parts)
        if message.is_string and self.takes_strings:
            return "".join(part for part in message.parts if isinstance(part, str))
        if self.takes_images or (self.takes_parts and not has_image):
            return [_typed(self._text(part) if self._is_text(part) else part) for part in message.parts]
        texts = [self._text(part) for part in message.parts]
        if self.takes_parts and not self.takes_strings:
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)

    def _text(self, part: Part) -> str:
        if isinstance(part, str):
            return part
        return (self._image_token if isinstance(part, ImagePart) else self._video_token) or ""

    def _is_text(self, part: Part) -> bool:
        """Whether an image is written into the text by its placeholder."""
        return self._moves_images and isinstance(part, ImagePart) and part.inline

    def _probe(self, content: Any) -> str | None:
        try:
            text = self._render([{"role": "user", "content": content}], add_generation_prompt=True)
        except Exception:  # whatever it raises, it does not take this form
            return None
        shows_it = _PROBE in text.casefold()
        shows_structure = not isinstance(content, str) and ("'type'" in text or '"type"' in text)
        return text if shows_it and not shows_structure else None

    def _probe_order(self) -> bool:
        """Whether an image between two texts is shown there."""
        words = {"type": "text", "text": _PROBE}
        text = self._probe([words, {"type": "image"}, words]) or ""
        return all(_PROBE in side.casefold() for side in text.partition(self._image_token or _PROBE)[::2])

    def _probe_system(self) -> bool:
        """Whether a message of the system may come first."""
        content: Any = _PROBE if self.takes_strings else [{"type": "text", "text": _PROBE}]
        question: Any = "?" if self.takes_strings else [{"type": "text", "text": "?"}]
        chat = [{"role": "system", "content": content}, {"role": "user", "content": question}]
        try:
            return _PROBE in self._render(chat, add_generation_prompt=True).casefold()
        except Exception:  # whatever it raises, it does not take this role
            return False

    def _probe_result(self) -> bool:
        """Whether an image that a function has given back is shown where it stands."""
        question: Any = "?" if self.takes_strings else [{"type": "text", "text": "?"}]
        call = ToolCall("000000000", "f", {})
        result = Message("tool", (ImagePart(), _PROBE), tool_call_id=call.id, name=call.name)
        chat = [
            {"role": "user", "content": question},
            {**_beside_content(Message("assistant", (), tool_calls=(call,))), "content": ""},
            {**_beside_content(result), "content": [_typed(part) for part in result.parts]},
        ]
        try:
            text = self._render(chat, add_generation_prompt=True)
        except Exception:  # whatever it raises, it does not take this form
            return False
        return text.count(self._image_token or "") == 1 and _PROBE in text.casefold()

    def _render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
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
    """What may be why a template refuses messages: it wants each result's function."""
    unknown = [message.tool_call_id for message in messages if message.role == "tool" and message.name is None]
    return f"; no call before its result has the id {unknown[0]!r:.100}" if unknown else ""


class _GenerationBlocks(Extension):
    """``{% generation %}`` marks the assistant's words for training; for inference it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
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
