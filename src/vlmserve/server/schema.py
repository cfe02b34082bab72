"""Requests and responses of the API, as OpenAI writes them.

Requests are pydantic models, which say what is wrong where. Responses are msgspec structs: one is encoded for every
token of every stream. https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator

from vlmserve.config import MAX_FPS
from vlmserve.errors import InvalidRequestError
from vlmserve.types import MAX_CACHE_SALT, SamplingParams

MAX_CHOICES = 16
_MAX_COUNT = 2**31 - 1

IGNORED_FIELDS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Fields that never change an answer."""

NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_json": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields that are not supported, and the values with which they change nothing."""


class RequestModel(BaseModel):
    """Base of what clients send: JSON types are not converted, unknown fields are errors, null means absent."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        return {key: field for key, field in value.items() if field is not None} if isinstance(value, dict) else value


class TextPart(RequestModel):
    """A piece of text."""

    type: Literal["text"]
    text: str


class ImageURL(RequestModel):
    """Where a picture is: a data URL or an http(s) URL. detail is accepted and changes nothing."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class VideoURL(RequestModel):
    """Where a video's file is: a data URL or an http(s) URL."""

    url: str


def _as_url(value: Any) -> Any:
    return {"url": value} if isinstance(value, str) else value


Pixels = Annotated[int, Field(ge=1, le=_MAX_COUNT)]


class MediumPart(RequestModel):
    """What pictures and videos have in common: bounds of their area once resized, for models that take any size."""

    min_pixels: Pixels | None = None
    max_pixels: Pixels | None = None


class ImagePart(MediumPart):
    """A picture."""

    type: Literal["image_url"]
    image_url: Annotated[ImageURL, BeforeValidator(_as_url)]


class VideoURLPart(MediumPart):
    """A video's file. fps: frames to take of a second of it."""

    type: Literal["video_url"]
    video_url: Annotated[VideoURL, BeforeValidator(_as_url)]
    fps: float | None = Field(None, gt=0, le=MAX_FPS)


class VideoPart(MediumPart):
    """A video as the URLs of its frames. fps: how many of them are a second."""

    type: Literal["video"]
    video: Annotated[list[str], Field(min_length=1)]
    fps: float | None = Field(None, gt=0, le=MAX_FPS)


PARTS = ("text", "image_url", "video_url", "video")


# Tags in angle brackets never reach a client: `_path` leaves them out.
def _content_kind(value: Any) -> str | None:
    return "<text>" if isinstance(value, str) else "<parts>" if isinstance(value, list) else None


def _part_kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>" if kind in PARTS else None


Part = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[ImagePart, Tag("<image_url>")]
    | Annotated[VideoURLPart, Tag("<video_url>")]
    | Annotated[VideoPart, Tag("<video>")],
    Discriminator(
        _part_kind,
        custom_error_type="part",
        custom_error_message=f"Input should be an object with a type out of {', '.join(map(repr, PARTS))}",
    ),
]
Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[Part], Tag("<parts>")],
    Discriminator(
        _content_kind, custom_error_type="content", custom_error_message="Input should be a string or a list of parts"
    ),
]


class Message(RequestModel):
    """One turn of a conversation. name, refusal and annotations are accepted and change nothing."""

    role: Annotated[
        Literal["system", "user", "assistant"],
        BeforeValidator(lambda role: "system" if role == "developer" else role),
    ]
    content: Content = ""
    name: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _needs_content(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("content") is None and value.get("role") != "assistant":
            raise ValueError("content is missing")
        return value


class StreamOptions(RequestModel):
    """What a stream carries besides text. include_obfuscation is accepted and changes nothing."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class ChatRequest(RequestModel):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    model: str | None = Field(None, description="A name that /v1/models lists; default: the only one.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES, description="Answers to the same question.")
    max_completion_tokens: int | None = Field(
        None, ge=1, le=_MAX_COUNT, description="Default: up to the end of the context."
    )
    max_tokens: int | None = Field(None, ge=1, le=_MAX_COUNT, description="The older name of max_completion_tokens.")
    temperature: float | None = Field(None, description="0 is greedy. Default: the model's, else 1.")
    top_p: float | None = Field(None, description="Default: the model's, else 1.")
    top_k: int | None = Field(
        None, ge=-1, le=_MAX_COUNT, description="0 or -1 keeps all tokens. Default: the model's, else 0."
    )
    min_p: float | None = Field(None, description="Default: the model's, else 0.")
    seed: int | None = None
    stop: Annotated[list[str], BeforeValidator(_as_list)] = Field([], description="A string or up to 16.")
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, le=_MAX_COUNT)]], Field(max_length=256)] = []
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, le=_MAX_COUNT)
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_CACHE_SALT,
        description="Nothing that is cached is shared with requests of another salt, or of none.",
    )

    @model_validator(mode="before")
    @classmethod
    def _check_other_fields(cls, value: Any) -> Any:
        """Drop what changes nothing; unsupported fields are told apart from unknown ones."""
        if not isinstance(value, dict):
            return value
        kept = {}
        for name, field in value.items():
            if name in cls.model_fields:
                kept[name] = field
            elif name in NEUTRAL_VALUES:
                if field is not None and field not in NEUTRAL_VALUES[name]:
                    raise InvalidRequestError(f"{name} is not supported here; leave it out", param=name)
            elif name not in IGNORED_FIELDS:
                raise InvalidRequestError(f"{name} is not a field of this request; is it misspelt?", param=name)
        return kept

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as `RequestPreparer.chat` takes them."""
        return [message.model_dump(include={"role", "content"}, exclude_none=True) for message in self.messages]

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """What to sample. Raises InvalidRequestError, naming the field, for a value out of range."""
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return SamplingParams(
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_p=defaults.top_p if self.top_p is None else self.top_p,
            top_k=defaults.top_k if self.top_k is None else 0 if self.top_k == -1 else self.top_k,
            min_p=defaults.min_p if self.min_p is None else self.min_p,
            seed=self.seed,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            max_tokens=limit,
            min_tokens=self.min_tokens,
        )


_MESSAGES = {
    "missing": "Field is missing",
    "extra_forbidden": "There is no such field",
    "too_short": "Input should not be empty",
    "model_type": "Input should be an object",
}


def parse_chat_request(body: bytes | bytearray) -> ChatRequest:
    """Raises InvalidRequestError, naming the field, for a body that is not JSON or not a chat request."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"The body is not valid JSON: {_json_problem(error)}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("The body should be a JSON object")
    try:
        return ChatRequest.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        path = _path(first["loc"])
        message = _MESSAGES.get(first["type"], first["msg"].removeprefix("Value error, "))
        raise InvalidRequestError(f"{path}: {message}" if path else message, param=path or None) from None


def _json_problem(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return str(error).removeprefix("JSON is malformed: ")


def _path(location: tuple[str | int, ...]) -> str:
    """``messages[0].content[1].image_url.url``"""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("<"):
            path += f".{part}" if path else part
    return path


class PromptTokensDetails(msgspec.Struct):
    """What the prompt cost. cached_tokens: those of the prompt that were found in the prefix cache. Beyond OpenAI's
    fields, images: pictures in the prompt; images_encoded: those that went through the vision tower.
    """

    cached_tokens: int
    images: int
    images_encoded: int


class Usage(msgspec.Struct):
    """Tokens of the prompt, once for all answers, and generated ones. The end token counts as generated."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class AnswerMessage(msgspec.Struct):
    """What the model said."""

    content: str
    role: str = "assistant"
    refusal: None = None


class AnswerChoice(msgspec.Struct):
    """One of the n answers."""

    index: int
    message: AnswerMessage
    finish_reason: str
    logprobs: None = None


class ChatCompletion(msgspec.Struct):
    """The response without ``stream``."""

    id: str
    created: int
    model: str
    choices: list[AnswerChoice]
    usage: Usage
    object: str = "chat.completion"


class Delta(msgspec.Struct, omit_defaults=True):
    """What is new in a choice of a stream."""

    role: str | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct):
    """A choice of a stream's chunk."""

    index: int
    delta: Delta
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct):
    """One event of the response with ``stream``. usage: left out unless asked for, then null but for the last."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    object: str = "chat.completion.chunk"


class ModelCard(msgspec.Struct):
    """An entry of ``/v1/models``. max_model_len: prompt and answer together, in tokens; null while loading."""

    id: str
    created: int
    max_model_len: int | None
    object: str = "model"
    owned_by: str = "vlmserve"
