"""OpenAI's ``/v1/completions``: https://platform.openai.com/docs/api-reference/completions"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, cast

import msgspec
from pydantic import Discriminator, Field, Tag

from vlmserve.server.schema.base import MAX_COUNT
from vlmserve.server.schema.logprobs import CompletionLogprobs, PromptLogprobs
from vlmserve.server.schema.sampling import NEUTRAL_VALUES, ChoicesRequest, TokenId
from vlmserve.server.schema.usage import Usage

MAX_PROMPTS = 128

_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL_VALUES,
    "messages": (),
    "prompt_embeds": (),
    "suffix": (),
    "tools": (),
}

TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]


def prompt_kind(value: Any) -> str | None:
    """The discriminator's tag of a text, token ids, or a list of either."""
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list) or not value:
        return None
    first = value[0]
    if isinstance(first, str):
        return "<texts>"
    return "<tokens>" if isinstance(first, int) else "<lists>"


BY_KIND_OF_PROMPT = Discriminator(
    prompt_kind,
    custom_error_type="prompt",
    custom_error_message="must be a text, a list of token ids, or a list of several of either",
)
Prompts = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[Annotated[list[Text], Field(max_length=MAX_PROMPTS)], Tag("<texts>")]
    | Annotated[TokenIds, Tag("<tokens>")]
    | Annotated[Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS)], Tag("<lists>")],
    BY_KIND_OF_PROMPT,
]


def listed(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """Texts or token ids, one for each prompt."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return list(cast("list[str | list[int]]", prompt))


class CompletionRequest(ChoicesRequest):
    """The body of ``POST /v1/completions``."""

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = _NEUTRAL_VALUES
    content_fields: ClassVar[tuple[str, ...]] = ("prompt",)

    prompt: Prompts
    max_tokens: int | None = Field(
        None, ge=0, le=MAX_COUNT, description="0: nothing is generated. Default: a fifth of the context."
    )
    echo: bool = Field(False, description="Begin answers with the prompt.")

    logprobs: int | None = Field(
        None, ge=0, le=MAX_COUNT, description="Return logprobs of each token and of this many alternatives."
    )

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """Texts or token ids, one for each prompt."""
        return listed(self.prompt)


class CompletionChoice(msgspec.Struct):
    """An answer, or its new part in a stream. Logprobs of the prompt and token ids are absent unless requested."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct):
    """The response, or an event of a stream. Events have usage only if requested."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    object: str = "text_completion"
