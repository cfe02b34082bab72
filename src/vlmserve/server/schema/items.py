"""Items of responses and conversations: messages, as OpenAI's Responses API writes them."""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag, model_validator

from vlmserve.server.schema.base import RequestModel, by_type, text_or_list
from vlmserve.server.schema.content import MediumPart

MAX_ITEMS = 4096
"""Items in one request."""

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
"""Up to 16 strings of up to 512 characters, under names of up to 64."""


class InputText(RequestModel):
    """A piece of what is asked."""

    type: Literal["input_text"]
    text: str


class InputImage(MediumPart):
    """A picture: a data URL, an http(s) URL or a file that was uploaded. detail: as in chat completions."""

    type: Literal["input_image"]
    image_url: str | None = None
    file_id: str | None = None
    detail: Literal["auto", "low", "high", "original"] = "auto"

    @model_validator(mode="after")
    def _one_source(self) -> InputImage:
        if (self.image_url is None) == (self.file_id is None):
            raise ValueError("An input_image has either an image_url or a file_id")
        return self


class InputFile(RequestModel):
    """A picture or a video that was uploaded."""

    type: Literal["input_file"]
    file_id: str

    @model_validator(mode="before")
    @classmethod
    def _only_by_id(cls, value: Any) -> Any:
        for name in ("file_data", "file_url", "filename", "detail") if isinstance(value, dict) else ():
            if value.get(name) is not None:
                raise ValueError(f"{name} is not supported here; upload the file to /v1/files and send its file_id")
        return value


class OutputText(RequestModel):
    """A piece of what was answered earlier. annotations and logprobs are accepted and change nothing."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Refusal(RequestModel):
    """What a model said instead of an answer."""

    type: Literal["refusal"]
    refusal: str


Part = Annotated[
    Annotated[InputText, Tag("<input_text>")]
    | Annotated[InputImage, Tag("<input_image>")]
    | Annotated[InputFile, Tag("<input_file>")]
    | Annotated[OutputText, Tag("<output_text>")]
    | Annotated[Refusal, Tag("<refusal>")],
    by_type("input_text", "input_image", "input_file", "output_text", "refusal"),
]


class InputItem(RequestModel):
    """A message. id, status and phase, which earlier answers have, are accepted and change nothing."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[list[Part], Field(min_length=1), Tag("<list>")],
        text_or_list("parts"),
    ]
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_messages(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if kind not in (None, "message"):
            raise ValueError(f"Items of type {kind!r:.60} are not supported here, only messages")
        return value

    def stored(self) -> dict[str, Any]:
        """The item as it is kept and shown: with an id of its own."""
        content = self.content
        if isinstance(content, str):
            parts = [output_text(content)] if self.role == "assistant" else [{"type": "input_text", "text": content}]
        else:
            parts = [_stored_part(part) for part in content]
        return message(self.role, parts)


def message(
    role: str, content: list[dict[str, Any]], status: str = "completed", id: str | None = None
) -> dict[str, Any]:
    """A message as it is kept and shown."""
    return {"id": id or new_item_id(), "type": "message", "status": status, "role": role, "content": content}


def new_item_id() -> str:
    """An id that no other item has."""
    return f"msg_{uuid.uuid4().hex}"


def output_text(text: str) -> dict[str, Any]:
    """The part that an answer is made of."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _stored_part(part: Part) -> dict[str, Any]:
    if isinstance(part, OutputText):
        return output_text(part.text)
    return part.model_dump(exclude_none=True)


def _as_items(value: Any) -> Any:
    if value == "":
        raise ValueError("Input should not be empty")
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


InputItems = Annotated[list[InputItem], Field(max_length=MAX_ITEMS)]
Input = Annotated[InputItems, BeforeValidator(_as_items)]
"""A text of the user's, or items."""


def chat_message(item: dict[str, Any]) -> dict[str, Any]:
    """A stored item as a message of chat completions; files are still parts of type ``file``."""
    role = "system" if item["role"] == "developer" else item["role"]
    parts = [_chat_part(part) for part in item["content"]]
    if role == "assistant" and all(part["type"] == "text" for part in parts):
        return {"role": role, "content": "".join(part["text"] for part in parts)}
    if len(parts) == 1 and parts[0]["type"] == "text":
        return {"role": role, "content": parts[0]["text"]}
    return {"role": role, "content": parts}


def _chat_part(part: dict[str, Any]) -> dict[str, Any]:
    match part["type"]:
        case "input_text" | "output_text":
            return {"type": "text", "text": part["text"]}
        case "refusal":
            return {"type": "text", "text": part["refusal"]}
    limits: dict[str, Any] = {name: part[name] for name in ("min_pixels", "max_pixels") if name in part}
    detail = {"detail": part["detail"]} if "detail" in part else {}
    if "file_id" in part:
        return {"type": "file", "file": {"file_id": part["file_id"], **detail}, **limits}
    return {"type": "image_url", "image_url": {"url": part["image_url"], **detail}, **limits}
