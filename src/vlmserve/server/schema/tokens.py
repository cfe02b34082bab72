"""``/tokenize`` and ``/detokenize``, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Self

import msgspec
from pydantic import Field, model_validator

from vlmserve.server.schema.base import MAX_COUNT, RequestModel
from vlmserve.server.schema.content import Message, PromptRequest, TemplateSettings

TokenId = Annotated[int, Field(ge=0, le=MAX_COUNT)]


class TokenizeRequest(PromptRequest):
    """The body of ``POST /tokenize``: a text, or a conversation with all that its prompt has."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: TemplateSettings = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("Give either prompt or messages")
        return self


class Tokenized(msgspec.Struct, omit_defaults=True):
    """What a text is to the model. token_strs: the tokens as the vocabulary writes them, if they were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestModel):
    """The body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[TokenId]


class Detokenized(msgspec.Struct):
    """What tokens say."""

    prompt: str
