"""OpenAI's ``/v1/embeddings`` with vLLM's messages, and vLLM's ``/pooling``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from pydantic import Field, Tag, model_validator

from vlmserve.server.schema.asking import ModelRequest
from vlmserve.server.schema.base import MAX_COUNT
from vlmserve.server.schema.completions import BY_KIND_OF_PROMPT, Text, TokenIds, listed
from vlmserve.server.schema.content import Message, PromptRequest, TemplateSettings
from vlmserve.server.schema.usage import PromptTokensDetails
from vlmserve.tasks import Pooling

MAX_INPUTS = 2048

Inputs = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[Annotated[list[Text], Field(max_length=MAX_INPUTS)], Tag("<texts>")]
    | Annotated[TokenIds, Tag("<tokens>")]
    | Annotated[Annotated[list[TokenIds], Field(max_length=MAX_INPUTS)], Tag("<lists>")],
    BY_KIND_OF_PROMPT,
]


class EmbeddingRequest(PromptRequest, ModelRequest):
    """The body of ``POST /v1/embeddings``."""

    content_fields: ClassVar[tuple[str, ...]] = ("input", "messages")

    input: Inputs | None = Field(None, description="A text, token ids, or a list of several of either.")
    messages: Annotated[list[Message], Field(min_length=1)] | None = Field(
        None, description="A conversation in place of input, which may show images, videos and documents."
    )
    dimensions: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="Leading elements of the vector to keep. Default: all."
    )
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="base64: the vector's little-endian float32 bytes."
    )
    normalize: bool | None = Field(None, description="Scale vectors to length 1. Default: the model's, else yes.")
    chat_template_kwargs: TemplateSettings = None
    add_generation_prompt: bool | None = Field(
        None, description="End the conversation with the start of an answer. Default: the model's, else yes."
    )
    continue_final_message: bool = Field(False, description="End the conversation inside the last message.")

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if (self.input is None) == (self.messages is None):
            raise ValueError("Give either input or messages")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt cannot both be true")
        return self

    @property
    def pooling(self) -> Pooling | None:
        return None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Texts or token ids, one for each vector; empty with messages."""
        return [] if self.input is None else listed(self.input)


class PoolingRequest(EmbeddingRequest):
    """The body of ``POST /pooling``."""

    task: Literal["embed", "token_embed"] | None = Field(
        None, description="token_embed: a vector of each token. embed: one vector. Default: as the model was trained."
    )

    @property
    def pooling(self) -> Pooling | None:
        return "all" if self.task == "token_embed" else None


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Embedding(msgspec.Struct):
    """The vector of one input, as numbers or base64; a list of vectors if each token has one."""

    index: int
    embedding: list[Any] | str
    object: str = "embedding"


class EmbeddingList(msgspec.Struct):
    """The response, in the order of the inputs."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


class PoolingData(msgspec.Struct):
    """The vectors of one input: numbers, lists of numbers, or base64 of all numbers."""

    index: int
    data: list[Any] | str
    object: str = "pooling"


class PoolingList(msgspec.Struct):
    """The response in vLLM's form, in the order of the inputs."""

    id: str
    created: int
    model: str
    data: list[PoolingData]
    usage: EmbeddingUsage
    object: str = "list"
