"""Turns checked messages into tokens with chat template, tool form and tokenizer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from vlmserve.errors import InvalidRequestError
from vlmserve.frontend.answer_formats import AnswerFormats
from vlmserve.frontend.tools import ToolUse, for_template
from vlmserve.prompt.template import ChatTemplate, Message, ToolCall
from vlmserve.prompt.tokenizer import Tokenizer
from vlmserve.prompt.untrusted import Quotation
from vlmserve.types import MediaKind, Thoughts


class ConversationOptions(TypedDict, total=False):
    add_generation_prompt: bool
    """End with the beginning of an answer (default)."""
    continue_final_message: bool
    """Continue the last message, an assistant message with text. Overrides `add_generation_prompt`."""
    allow_local: bool
    """Also accept ``{"type": "image", "image": …}`` with any `ImageSource`, paths, videos of such frames, and
    ``{"type": "document", "document": …}`` with any `DocumentSource`. Only for callers in the same process, never for
    HTTP.
    """
    cache_salt: str
    """Requests share images only if their salts are equal."""
    tools: ToolUse | None
    """Tools that the model may call."""
    template_settings: Mapping[str, Any] | None
    """Variables of the chat template."""
    mm_processor_kwargs: Mapping[str, Any] | None
    """Default budget of images and default fps of videos."""


_THINKING_SETTINGS = ("enable_thinking", "thinking")
"""Variables of chat templates that switch thinking: Qwen and GLM, DeepSeek and Granite."""


def thinking_settings(thinks: bool, known: Collection[str]) -> dict[str, Any]:
    """The template's variable for whether to think, if any."""
    return {name: thinks for name in _THINKING_SETTINGS if name in known}


@dataclass(frozen=True)
class Rendered:
    """A prompt's tokens, with one placeholder for each image and video."""

    token_ids: list[int]
    thoughts: Thoughts | None


@dataclass(frozen=True)
class Renderer:
    template: ChatTemplate
    tool_template: ChatTemplate
    """Renders requests with tools."""
    tokenizer: Tokenizer
    answers: AnswerFormats
    adds_special_tokens: bool
    """The tokenizer adds special tokens that the template omits. In Transformers, processors do this and tokenizers do
    not.
    """

    def render(
        self, messages: Sequence[Message], counts: Mapping[MediaKind, int], options: ConversationOptions
    ) -> Rendered:
        """counts: media in the messages, by kind. Raises InvalidRequestError if the template omits media, and as
        `ChatTemplate.render` does.
        """
        tools = options.get("tools")
        template, form = self.template if tools is None else self.tool_template, self.answers.tool_form
        if not template.knows_tools:
            form = replace(form, native=False)
        settings = options.get("template_settings")
        continues = options.get("continue_final_message", False)
        quotation = Quotation(self.tokenizer.control_tokens)
        described = None
        if tools is not None and form.native:
            described = [quoted_json(function.described(), quotation) for function in tools.functions]
        text = template.render(
            [quoted_message(message, quotation) for message in for_template(template, messages, form, tools)],
            add_generation_prompt=options.get("add_generation_prompt", True),
            tools=described,
            settings=settings and quoted_json(settings, quotation),
            continue_final_message=continues,
        )
        _check_shown(text, self.tokenizer.image_mark, counts.get("image", 0), "images")
        _check_shown(text, self.tokenizer.video_token, counts.get("video", 0), "videos")
        begun = str(messages[-1].parts[-1]) if continues else None
        thoughts = None if self.answers.reasoning is None else self.answers.reasoning.after(text, begun)
        text = self.tokenizer.write_media(text)
        ids = self.tokenizer.encode_quoted(text, quotation, add_special_tokens=self.adds_special_tokens)
        return Rendered(ids, thoughts)


def texts(*values: Any) -> Iterator[str]:
    """All strings among a chat template's variables."""
    for value in values:
        match value:
            case str():
                yield value
            case ToolCall():
                yield from texts(value.id, value.name, value.arguments)
            case ToolUse():
                yield from texts(*(function.described() for function in value.functions))
            case Mapping():
                yield from texts(*value, *value.values())
            case list() | tuple():
                yield from texts(*value)


def _check_shown(text: str, mark: str | None, count: int, kind: str) -> None:
    if mark is not None and text.count(mark) != count:
        raise InvalidRequestError(
            f"the model's chat template shows {text.count(mark)} of the {count} {kind}; "
            f"put {kind} into the messages of the user",
            param="messages",
        )


def quoted_message(message: Message, quotation: Quotation) -> Message:
    """Quote a user's message, so that nothing in it becomes a control token."""
    parts = (quotation.quote(part) if isinstance(part, str) else part for part in message.parts)
    calls = [
        ToolCall(*(quoted_json(value, quotation) for value in (call.id, call.name, call.arguments)))
        for call in message.tool_calls
    ]
    call_id, name, reasoning = (
        value and quotation.quote(value) for value in (message.tool_call_id, message.name, message.reasoning)
    )
    return replace(
        message, parts=tuple(parts), tool_calls=tuple(calls), tool_call_id=call_id, name=name, reasoning=reasoning
    )


def quoted_json(value: Any, quotation: Quotation) -> Any:
    if isinstance(value, str):
        return quotation.quote(value)
    if isinstance(value, dict):
        return {quotation.quote(key): quoted_json(item, quotation) for key, item in value.items()}
    if isinstance(value, list):
        return [quoted_json(item, quotation) for item in value]
    return value
