"""Items of responses and conversations, in the form of OpenAI's Responses API: messages, calls, results, reasoning."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from vlmserve.server.schema.base import ByType, RequestModel, TextOrList
from vlmserve.server.schema.content import Budget, Pages
from vlmserve.server.schema.foreign_items import as_known, as_message

MAX_ITEMS = 4096
"""Maximum items in one request."""

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
"""Up to 16 strings of up to 512 characters, with names of up to 64."""

Includable = Literal[
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""Values of `include`. Image URLs are always included, logprobs if requested; responses never have the other parts."""


_BREAKPOINT = frozenset({"prompt_cache_breakpoint"})
"""It has no effect: all prompts are cached."""


class InputText(RequestModel):
    ignored_fields: ClassVar[frozenset[str]] = _BREAKPOINT

    type: Literal["input_text"]
    text: str


class InputImage(Budget):
    """An image: a data URL, an http(s) URL or an uploaded file. detail: as in chat completions."""

    ignored_fields: ClassVar[frozenset[str]] = _BREAKPOINT

    type: Literal["input_image"]
    image_url: str | None = None
    file_id: str | None = None
    detail: Literal["auto", "low", "high", "original"] = "auto"

    @model_validator(mode="after")
    def _one_source(self) -> InputImage:
        if (self.image_url is None) == (self.file_id is None):
            raise ValueError("An input_image has either an image_url or a file_id")
        return self


class InputFile(Budget):
    """A document, whose pages become images: an uploaded file, base64, a data URL or an http(s) URL.

    An uploaded file may also be an image or video. filename and detail have no effect.
    """

    ignored_fields: ClassVar[frozenset[str]] = _BREAKPOINT

    type: Literal["input_file"]
    file_id: str | None = None
    file_data: str | None = None
    file_url: str | None = None
    filename: str | None = None
    detail: Literal["auto", "low", "high"] | None = Field(None, exclude=True)
    pages: Pages = None

    @model_validator(mode="after")
    def _one_source(self) -> InputFile:
        if [self.file_id, self.file_data, self.file_url].count(None) != 2:
            raise ValueError("An input_file has one of file_id, file_data and file_url")
        return self


class OutputText(RequestModel):
    """A text in an earlier answer. annotations and logprobs have no effect."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Refusal(RequestModel):
    type: Literal["refusal"]
    refusal: str


Part = Annotated[InputText | InputImage | InputFile | OutputText | Refusal, ByType()]
ResultPart = Annotated[InputText | InputImage | InputFile | OutputText, ByType()]
CallId = Annotated[str, Field(min_length=1, max_length=256)]


class MessageItem(RequestModel):
    """A message. id, status and phase of earlier answers have no effect."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[str | Annotated[list[Part], Field(min_length=1)], TextOrList("parts")]
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    def stored(self) -> dict[str, Any]:
        content = self.content
        if isinstance(content, str):
            parts = [output_text(content)] if self.role == "assistant" else [{"type": "input_text", "text": content}]
        else:
            parts = [_stored_part(part) for part in content]
        return message(self.role, parts)


class CallItem(RequestModel):
    """A function call in an earlier answer. arguments: JSON. status: incomplete if cut off. id has no effect."""

    type: Literal["function_call"]
    call_id: CallId
    name: Annotated[str, Field(min_length=1)]
    arguments: str
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] = "completed"

    def stored(self) -> dict[str, Any]:
        status = "incomplete" if self.status == "incomplete" else "completed"
        return function_call(self.call_id, self.name, self.arguments, status)


class OutputItem(RequestModel):
    """The result of a function call. id, status and name have no effect."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: Annotated[str | list[ResultPart], TextOrList("parts")]
    id: str | None = None
    status: str | None = None
    name: str | None = None

    def stored(self) -> dict[str, Any]:
        output = self.output if isinstance(self.output, str) else [_stored_part(part) for part in self.output]
        return {
            "id": _new_id("fco"),
            "type": self.type,
            "status": "completed",
            "call_id": self.call_id,
            "output": output,
        }


class McpCallItem(RequestModel):
    """A call that another server ran, with its output or error."""

    type: Literal["mcp_call"]
    name: Annotated[str, Field(min_length=1)]
    arguments: str
    output: str | None = None
    error: str | None = None
    server_label: str | None = None
    id: str | None = None
    status: str | None = None

    def stored(self) -> dict[str, Any]:
        return {
            "id": _new_id("mcp"),
            "type": self.type,
            "status": "completed",
            "name": self.name,
            "arguments": self.arguments,
            "output": self.output,
            "error": self.error,
            "server_label": self.server_label,
        }


class ReasoningText(RequestModel):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(RequestModel):
    type: Literal["summary_text"]
    text: str


class ReasoningItem(RequestModel):
    """Reasoning before an answer. Chat templates may show it to the model again.

    id, status, summary and encrypted_content have no effect.
    """

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    summary: list[SummaryText] = Field(default_factory=list)
    encrypted_content: str | None = None
    id: str | None = None
    status: str | None = None

    def stored(self) -> dict[str, Any]:
        return reasoning("".join(part.text for part in self.content or ()))


class ItemReference(RequestModel):
    """A reference to an item of an earlier response or conversation."""

    type: Literal["item_reference"]
    id: Annotated[str, Field(min_length=1, max_length=256)]


def message(
    role: str, content: list[dict[str, Any]], status: str = "completed", id: str | None = None
) -> dict[str, Any]:
    return {"id": id or _new_id("msg"), "type": "message", "status": status, "role": role, "content": content}


def reasoning(text: str, status: str = "completed", id: str | None = None) -> dict[str, Any]:
    content = [reasoning_text(text)] if text else []
    return {"id": id or _new_id("rs"), "type": "reasoning", "status": status, "summary": [], "content": content}


def function_call(
    call_id: str, name: str, arguments: str, status: str = "completed", id: str | None = None
) -> dict[str, Any]:
    return {
        "id": id or _new_id("fc"),
        "type": "function_call",
        "status": status,
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
    }


def copy_of(item: dict[str, Any]) -> dict[str, Any]:
    return {**item, "id": _new_id(item["id"].partition("_")[0])}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def output_text(text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*logprobs]}


def reasoning_text(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def parts_of(item: dict[str, Any]) -> list[dict[str, Any]]:
    content = item.get("content", item.get("output"))
    return content if isinstance(content, list) else []


def _stored_part(part: Part) -> dict[str, Any]:
    if isinstance(part, OutputText):
        return output_text(part.text)
    return part.model_dump(exclude_none=True)


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _known_kind(*kinds: str) -> BeforeValidator:
    """Convert items of other types to known ones. Rejects references unless they are in `kinds`."""

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        value = as_known(value)
        kind = value.get("type") or "message"
        if kind in kinds:
            return value
        if kind == "item_reference" or not isinstance(value["type"], str):
            raise ValueError(f"Items of type {value['type']!r:.60} are not supported here")
        return as_message(value)

    return BeforeValidator(check)


_Item = MessageItem | CallItem | OutputItem | McpCallItem | ReasoningItem
_KINDS = ("message", "function_call", "function_call_output", "mcp_call", "reasoning")
_BY_TYPE = ByType(default="message")
InputItem = Annotated[_Item, _BY_TYPE, _known_kind(*_KINDS)]
InputItems = Annotated[
    list[Annotated[_Item | ItemReference, _BY_TYPE, _known_kind(*_KINDS, "item_reference")]],
    Field(max_length=MAX_ITEMS),
]
Input = Annotated[InputItems, BeforeValidator(_as_items)]
"""A user's text, or items."""
