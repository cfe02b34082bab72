"""Ollama's API (https://docs.ollama.com/api). Requests are converted to chat completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import msgspec
from pydantic import Field

from vlmserve.errors import InvalidRequestError
from vlmserve.server.schema.base import JSONObject, RequestModel, validate
from vlmserve.server.schema.chat import ChatRequest
from vlmserve.server.schema.embeddings import EmbeddingRequest
from vlmserve.server.schema.structured import Schema

LATEST = ":latest"
"""The default tag. Ollama's clients expect a tag in each listed name."""
_UNLIMITED = (0, -1, -2)
"""Values of num_predict without a limit: 0 and -1, and -2 (until the context is full)."""


class Options(RequestModel):
    """Sampling parameters. Options for loading a model have no effect."""

    ignored_fields: ClassVar[frozenset[str]] = frozenset(
        {"low_vram", "main_gpu", "num_batch", "num_ctx", "num_gpu", "num_keep", "num_thread", "numa",
         "penalize_newline", "use_mlock", "use_mmap", "vocab_only"}
    )  # fmt: skip

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    num_predict: int | None = Field(None, ge=-2, description="Longest answer in tokens; 0, -1 or -2: no limit.")
    stop: list[str] | str | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def as_chat(self) -> JSONObject:
        fields = self.model_dump(exclude_none=True)
        limit = fields.pop("num_predict", None)
        return fields if limit is None or limit in _UNLIMITED else {**fields, "max_tokens": limit}


class SentFunction(RequestModel):
    """A function call in a message. arguments: an object, not a string."""

    name: str
    arguments: JSONObject = Field(default_factory=dict)


class SentCall(RequestModel):
    function: SentFunction


class OllamaMessage(RequestModel):
    """A message. images: base64. tool_name: the tool whose result the message is."""

    role: str
    content: str = ""
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[SentCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


_NOTHING = OllamaMessage(role="user")


class OllamaRequest(RequestModel):
    """Common fields of chat and generate."""

    ignored_fields: ClassVar[frozenset[str]] = frozenset({"keep_alive", "context", "truncate", "shift"})

    model: str
    stream: bool = True
    format: Schema | None = Field(None, description='"json", or a JSON schema.')
    options: Options = Field(default_factory=lambda: Options.model_validate({}))
    think: bool | str | None = Field(None, description="Reason before the answer: true, false, low, medium or high.")
    cache_salt: str | None = None

    def _fields(self) -> dict[str, Any]:
        fields = {"model": self.model.removesuffix(LATEST), "stream": self.stream, **self.options.as_chat()}
        if self.cache_salt is not None:
            fields["cache_salt"] = self.cache_salt
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif self.format:
            fields["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": self.format},
            }
        if isinstance(self.think, str):
            fields["reasoning_effort"] = self.think
        elif self.think is not None:
            fields["chat_template_kwargs"] = dict.fromkeys(("enable_thinking", "thinking"), self.think)
            fields["include_reasoning"] = self.think
        return fields


class OllamaChatRequest(OllamaRequest):
    """The body of ``POST /api/chat``. Without messages it loads the model."""

    messages: list[OllamaMessage] = Field(default_factory=list)
    tools: list[JSONObject] | None = None

    @property
    def is_empty(self) -> bool:
        return not self.messages

    def as_chat(self) -> ChatRequest:
        """Convert to chat completions. Raises InvalidRequestError, naming the field there."""
        fields = self._fields()
        if self.tools:
            fields["tools"] = [{"type": "function", **tool} for tool in self.tools]
        return validate(ChatRequest, {**fields, "messages": _chat_messages(self.messages or [_NOTHING])})


class OllamaGenerateRequest(OllamaRequest):
    """The body of ``POST /api/generate``. Without a prompt it loads the model."""

    prompt: str = ""
    system: str | None = None
    images: list[str] | None = None
    raw: bool = False
    suffix: str | None = None
    template: str | None = None

    @property
    def is_empty(self) -> bool:
        return not self.prompt and not self.images

    def as_chat(self) -> ChatRequest:
        """Convert to chat completions. Raises InvalidRequestError for unsupported fields."""
        if self.raw or self.suffix or self.template:
            name = "raw" if self.raw else "suffix" if self.suffix else "template"
            raise InvalidRequestError(f"{name} is not supported; send the whole prompt to /v1/completions", param=name)
        system = [{"role": "system", "content": self.system}] if self.system else []
        user = {"role": "user", "content": _content(self.prompt, self.images)}
        return validate(ChatRequest, {**self._fields(), "messages": [*system, user]})


class ShowRequest(RequestModel):
    """The body of ``POST /api/show``. name: its older form."""

    ignored_fields: ClassVar[frozenset[str]] = frozenset({"verbose", "options", "system", "template"})

    model: str = ""
    name: str = ""

    @property
    def wanted(self) -> str:
        return (self.model or self.name).removesuffix(LATEST)


def _content(text: str, images: list[str] | None) -> str | list[dict[str, Any]]:
    if not images:
        return text
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": _data_url(image)}} for image in images]
    return [*parts, {"type": "text", "text": text}]


def _data_url(image: str) -> str:
    """Make a data URL. The content decides the media type, not the URL."""
    return image if image.startswith("data:") else f"data:image/x;base64,{image}"


def _chat_messages(messages: Iterable[OllamaMessage]) -> list[dict[str, Any]]:
    """Calls have no ids, so a result belongs to the earliest open call."""
    converted: list[dict[str, Any]] = []
    open_calls: list[str] = []
    num_calls = 0
    for message in messages:
        one: dict[str, Any] = {"role": message.role, "content": _content(message.content, message.images)}
        if message.thinking:
            one["reasoning_content"] = message.thinking
        if message.tool_calls:
            one["tool_calls"] = []
            for call in message.tool_calls:
                arguments = msgspec.json.encode(call.function.arguments).decode()
                function = {"name": call.function.name, "arguments": arguments}
                one["tool_calls"].append({"id": f"call_{num_calls}", "type": "function", "function": function})
                open_calls.append(f"call_{num_calls}")
                num_calls += 1
        if message.role == "tool":
            one["tool_call_id"] = message.tool_call_id or (open_calls.pop(0) if open_calls else "call")
        converted.append(one)
    return converted


class _EmbedRequest(RequestModel):
    """Fields of all requests for vectors."""

    ignored_fields: ClassVar[frozenset[str]] = frozenset({"keep_alive"})

    model: str
    truncate: bool = Field(True, description="Cut inputs that are too long.")
    dimensions: int | None = None
    options: JSONObject = Field(default_factory=dict, description="Has no effect on vectors.")
    cache_salt: str | None = None

    @property
    def texts(self) -> str | list[str]:
        raise NotImplementedError

    def as_embedding(self) -> EmbeddingRequest:
        """Convert to embeddings. Raises InvalidRequestError, naming the field there."""
        fields: dict[str, Any] = {"model": self.model.removesuffix(LATEST), "input": self.texts}
        if self.dimensions:
            fields["dimensions"] = self.dimensions
        if self.cache_salt is not None:
            fields["cache_salt"] = self.cache_salt
        return validate(EmbeddingRequest, fields)


class OllamaEmbedRequest(_EmbedRequest):
    """The body of ``POST /api/embed``."""

    input: str | list[str] = Field(description="A text, or a list of texts.")

    @property
    def texts(self) -> str | list[str]:
        return self.input


class OllamaEmbeddingsRequest(_EmbedRequest):
    """The body of ``POST /api/embeddings``."""

    prompt: str = Field(description="A text.")

    @property
    def texts(self) -> str | list[str]:
        return self.prompt


class OllamaEmbedding(msgspec.Struct):
    """The response of ``POST /api/embeddings``."""

    embedding: Any


class OllamaEmbeddings(msgspec.Struct):
    """The response of ``POST /api/embed``, in the order of the inputs. Durations are in nanoseconds."""

    model: str
    embeddings: list[Any]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class AnsweredFunction(msgspec.Struct):
    name: str
    arguments: dict[str, Any]


class AnsweredCall(msgspec.Struct):
    function: AnsweredFunction


class AnsweredMessage(msgspec.Struct, omit_defaults=True):
    """The answer, or its new part in a stream."""

    role: str
    content: str
    thinking: str = ""
    tool_calls: list[AnsweredCall] | msgspec.UnsetType = msgspec.UNSET


class OllamaAnswer(msgspec.Struct):
    """A response, or a line of a stream. Durations are in nanoseconds; only the last line has them."""

    model: str
    created_at: str
    done: bool
    message: AnsweredMessage | msgspec.UnsetType = msgspec.UNSET
    """Only in /api/chat."""
    response: str | msgspec.UnsetType = msgspec.UNSET
    """The text of /api/generate."""
    thinking: str | msgspec.UnsetType = msgspec.UNSET
    """Only in /api/generate."""
    done_reason: str | msgspec.UnsetType = msgspec.UNSET
    total_duration: int | msgspec.UnsetType = msgspec.UNSET
    load_duration: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_count: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_duration: int | msgspec.UnsetType = msgspec.UNSET
    eval_count: int | msgspec.UnsetType = msgspec.UNSET
    eval_duration: int | msgspec.UnsetType = msgspec.UNSET


class OllamaError(msgspec.Struct):
    """The response of a failed request, or the last line of a failed stream."""

    error: str


class ModelDetails(msgspec.Struct):
    """Details of a model; unknown ones are empty."""

    format: str = ""
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""
    parent_model: str = ""


class LocalModel(msgspec.Struct):
    """An entry of ``/api/tags`` and ``/api/ps``."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    """SHA-256 of the name: Ollama's command shows its first 12 digits."""
    details: ModelDetails
    capabilities: list[str]


class LocalModels(msgspec.Struct):
    """The response of ``GET /api/tags`` and ``/api/ps``."""

    models: list[LocalModel]


class ShownModel(msgspec.Struct):
    """The response of ``POST /api/show``."""

    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    modelfile: str = ""
    parameters: str = ""
    template: str = ""
    license: str = ""
