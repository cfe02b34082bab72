"""Chat messages and their content parts: text, images, videos, files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from vlmserve.errors import InvalidRequestError
from vlmserve.frontend.conversations import thinking_settings
from vlmserve.frontend.tools import ToolUse
from vlmserve.server.schema.base import MAX_COUNT, ByType, JSONObject, RequestModel, TextOrList
from vlmserve.server.schema.tools import CalledFunction, SentToolCall
from vlmserve.settings.config import MAX_FPS
from vlmserve.types import Grammar


class ChatPart(RequestModel):
    """Base of content parts. cache_control has no effect: all prompts are cached."""

    ignored_fields: ClassVar[frozenset[str]] = frozenset({"prompt_cache_breakpoint"})

    cache_control: dict[str, Any] | None = Field(None, exclude=True)


TemplateSettings = Annotated[
    JSONObject | None, Field(description="Variables of the model's chat template, such as enable_thinking.")
]


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def effort_settings(effort: ReasoningEffort | None, known: Collection[str]) -> dict[str, Any]:
    """The chat template's settings for a reasoning effort, if it has any."""
    if effort is None:
        return {}
    switches = thinking_settings(effort != "none", known)
    if switches and effort == "none":
        return switches
    return switches | ({"reasoning_effort": effort} if "reasoning_effort" in known else {})


class TextPart(ChatPart):
    type: Literal["text"]
    text: str


def _refusal_as_text(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    return part


class ImageURL(RequestModel):
    """A data URL or http(s) URL of an image."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None
    """"low": no tiles, or a small image for models of variable resolution. Other models ignore it."""


class VideoURL(RequestModel):
    """A data URL or http(s) URL of a video."""

    url: str


def _as_url(value: Any) -> Any:
    return {"url": value} if isinstance(value, str) else value


Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]


class Budget(RequestModel):
    """Size limits of an image, or of each frame of a video."""

    min_pixels: Count | None = None
    """Area after resizing, all tiles together."""
    max_pixels: Count | None = None
    """Area after resizing, all tiles together."""
    max_tokens: Count | None = None


_PROCESSOR_SETTINGS = (
    "crop_size do_pan_and_scan do_resize images_kwargs max_dynamic_patch max_image_size min_dynamic_patch num_crops "
    "num_frames size videos_kwargs".split()
)
"""Settings of transformers' processors that requests cannot change."""


class ProcessorKwargs(Budget):
    """Defaults for all images and videos of a request, by vLLM's name. fps: of videos."""

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = dict.fromkeys(_PROCESSOR_SETTINGS, ())

    fps: float | None = Field(None, gt=0, le=MAX_FPS)


class PromptRequest(RequestModel):
    """A request whose prompt may have images."""

    mm_processor_kwargs: ProcessorKwargs | None = Field(
        None, description="The budget of all images of the prompt: min_pixels, max_pixels, max_tokens; fps of videos."
    )

    @property
    def processor_kwargs(self) -> dict[str, Any] | None:
        kwargs = self.mm_processor_kwargs
        return None if kwargs is None else kwargs.model_dump(exclude_none=True)


class ImagePart(ChatPart, Budget):
    type: Literal["image_url"]
    image_url: Annotated[ImageURL, BeforeValidator(_as_url)]


class VideoURLPart(ChatPart, Budget):
    """A video file. fps: frames per second to sample."""

    type: Literal["video_url"]
    video_url: Annotated[VideoURL, BeforeValidator(_as_url)]
    fps: float | None = Field(None, gt=0, le=MAX_FPS)


class VideoPart(ChatPart, Budget):
    """A video as URLs of its frames. fps: of these frames."""

    type: Literal["video"]
    video: Annotated[list[str], Field(min_length=1)]
    fps: float | None = Field(None, gt=0, le=MAX_FPS)


Pages = Annotated[
    str | None, Field(max_length=1000, description='Pages of a document, like "1-3,7,10-"; default: all.')
]


class FileSource(RequestModel):
    """An uploaded file, or a document as base64, data URL or http(s) URL. filename has no effect."""

    file_id: str | None = None
    file_data: str | None = None
    file_url: str | None = None
    filename: str | None = Field(None, exclude=True)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if [self.file_id, self.file_data, self.file_url].count(None) != 2:
            raise ValueError("A file has one of file_id, file_data and file_url")
        return self


class FilePart(ChatPart, Budget):
    """A document, whose pages become images, or an uploaded image or video."""

    type: Literal["file"]
    file: FileSource
    pages: Pages = None


Part = Annotated[
    TextPart | ImagePart | VideoURLPart | VideoPart | FilePart, ByType(), BeforeValidator(_refusal_as_text)
]
Content = Annotated[str | list[Part], TextOrList("parts")]


class Message(RequestModel):
    """A message. name has no effect, nor have fields that clients copy from answers, like annotations."""

    ignored_fields: ClassVar[frozenset[str]] = frozenset({"context"})  # Azure OpenAI adds it to answers

    role: Annotated[
        Literal["system", "user", "assistant", "tool", "function"],
        BeforeValidator(lambda role: "system" if role == "developer" else role),
    ]
    content: Content = ""
    name: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    reasoning: str | None = None
    """Reasoning before the answer, by any of three names. Chat templates may show it to the model again."""
    reasoning_content: str | None = None
    thinking: str | None = None
    reasoning_details: list[Any] | None = None
    thinking_blocks: list[Any] | None = None
    provider_specific_fields: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    tool_calls: list[SentToolCall] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None

    @model_validator(mode="before")
    @classmethod
    def _needs_content(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("content") is None and value.get("role") != "assistant":
            raise ValueError("content is missing")
        return value


def can_continue(message: dict[str, Any]) -> bool:
    """Return whether an answer can continue a message: it is the assistant's and ends with text."""
    content = message["content"]
    end = content[-1].get("text") if isinstance(content, list) and content else content
    return message["role"] == "assistant" and bool(end) and not message.get("tool_calls")


def check_continuation(grammar: Grammar | None, tools: ToolUse | None) -> None:
    """Raise InvalidRequestError for a format or a required call, which need an answer from its start."""
    if grammar is not None:
        raise InvalidRequestError(
            f"{grammar.source} is the format of a whole answer; leave it out to continue the last message",
            param=grammar.source,
        )
    if tools is not None and tools.must_call:
        raise InvalidRequestError(
            "tool_choice must be auto or none to continue the last message, which is text", param="tool_choice"
        )


def conversation(messages: Sequence[Message]) -> list[dict[str, Any]]:
    fields = {"role", "content", "tool_calls", "tool_call_id"}
    messages = _with_tool_calls(messages)
    return [
        message.model_dump(include=fields, exclude_none=True)
        | thoughts_of(message.reasoning_content or message.reasoning or message.thinking)
        for message in messages
    ]


def _with_tool_calls(messages: Sequence[Message]) -> Sequence[Message]:
    """Replace the older ``function_call`` and the role ``function`` by tool calls and results."""
    if not any(message.function_call or message.role == "function" for message in messages):
        return messages
    shown: list[Message] = []
    call_id = "call_0"
    for index, message in enumerate(messages):
        if message.function_call is not None and not message.tool_calls:
            call_id = f"call_{index}"
            message = message.model_copy(
                update={"tool_calls": [SentToolCall(id=call_id, function=message.function_call)]}
            )
        elif message.role == "function":
            message = message.model_copy(update={"role": "tool", "tool_call_id": call_id})
        shown.append(message)
    return shown


def thoughts_of(text: str | None) -> dict[str, str]:
    return {"reasoning_content": text} if text else {}
