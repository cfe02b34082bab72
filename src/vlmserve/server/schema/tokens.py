"""vLLM's ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from typing import Annotated, Self

import msgspec
from pydantic import Field, model_validator

from vlmserve.frontend.tools import ToolUse
from vlmserve.server.schema.base import MAX_COUNT, RequestModel
from vlmserve.server.schema.content import Message, PromptRequest, TemplateSettings
from vlmserve.server.schema.tools import MAX_TOOLS, Tool, tool_use

TokenId = Annotated[int, Field(ge=0, le=MAX_COUNT)]


class TokenizeRequest(PromptRequest):
    """The body of ``POST /tokenize``: a text, or a conversation with tools. content: llama.cpp's name of prompt."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    tools: list[Tool] = Field(default_factory=list, max_length=MAX_TOOLS)
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: TemplateSettings = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if [self.prompt, self.content, self.messages].count(None) != 2:
            raise ValueError("Give one of prompt, content and messages")
        return self

    @property
    def text(self) -> str:
        return self.content or "" if self.prompt is None else self.prompt

    @property
    def tool_use(self) -> ToolUse | None:
        return tool_use([tool.function.function for tool in self.tools], None, True)


class Tokenized(msgspec.Struct, omit_defaults=True):
    """Tokens of a text. token_strs: as the vocabulary writes them, if requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestModel):
    """The body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[TokenId]


class Detokenized(msgspec.Struct):
    prompt: str
