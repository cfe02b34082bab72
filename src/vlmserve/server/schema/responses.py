"""``/v1/responses``, as OpenAI writes it: https://platform.openai.com/docs/api-reference/responses"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BeforeValidator, Field, model_validator

from vlmserve.errors import InvalidRequestError
from vlmserve.frontend.tools import ToolUse
from vlmserve.server.cache_diagnosis import DETAILS, Changed, Miss
from vlmserve.server.schema.asking import IGNORED_FIELDS
from vlmserve.server.schema.base import MAX_COUNT, RequestModel
from vlmserve.server.schema.content import PromptRequest, ReasoningEffort, TemplateSettings, effort_settings
from vlmserve.server.schema.items import Includable, Input, Metadata
from vlmserve.server.schema.response_tools import FunctionTool, ResponseToolChoice, response_tool_use
from vlmserve.server.schema.sampling import (
    LIMIT_NAMES,
    NEUTRAL_VALUES,
    OTHER_NAMES,
    SamplingRequest,
)
from vlmserve.server.schema.structured import OutputFormat, either_grammar, output_grammar
from vlmserve.server.schema.tools import MAX_TOOLS, offered
from vlmserve.server.schema.usage import Usage
from vlmserve.types import Grammar, ImageSize

_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL_VALUES,
    "background": (False,),
    "logprobs": (False,),
    "messages": (),
    "prompt": (),
}

_CHANGES = {
    "model": "model_changed", "tools": "tools_changed", "system": "input_changed", "messages": "input_changed"
}  # fmt: skip
"""Reasons that OpenAI's API has."""

_OTHER_NAMES: Mapping[str, str] = {
    **OTHER_NAMES,
    **dict.fromkeys((*LIMIT_NAMES, "max_tokens", "max_completion_tokens"), "max_output_tokens"),
    "reasoning_effort": "reasoning.effort",
}


class Reasoning(RequestModel):
    """How a model reasons before it answers. effort: for models whose chat template knows it, none also for those that
    know enable_thinking. summary has no effect: reasoning is not summarized."""

    ignored_fields: ClassVar[frozenset[str]] = frozenset({"context", "generate_summary", "mode"})

    effort: ReasoningEffort | None = None
    summary: Annotated[str, Field(max_length=64)] | None = None


class TextConfig(RequestModel):
    """How the answer is written."""

    ignored_fields: ClassVar[frozenset[str]] = frozenset({"verbosity"})

    format: OutputFormat | None = None


class ConversationRef(RequestModel):
    """Which conversation a response belongs to."""

    id: str


class CacheOptions(RequestModel):
    """How the prompt is cached. mode, ttl: without effect, since all prompts are cached and stay while there is room.
    prewarm: compute the prompt and generate nothing. comparison_response_id: a response to compare with."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Annotated[str, Field(max_length=64)] | None = None
    prewarm: bool = False
    comparison_response_id: str | None = None


class ResponsesRequest(PromptRequest, SamplingRequest):
    """The body of ``POST /v1/responses``."""

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = _NEUTRAL_VALUES
    ignored_fields: ClassVar[frozenset[str]] = IGNORED_FIELDS - {"prompt_cache_options"} | {"context_management"}
    other_names: ClassVar[Mapping[str, str]] = _OTHER_NAMES
    content_fields: ClassVar[tuple[str, ...]] = ("input",)

    input: Input = Field(default_factory=list, description="A text, or items.")
    instructions: str | None = Field(None, description="What the system says first, in this response only.")
    previous_response_id: str | None = Field(None, description="The response that this one follows.")
    conversation: Annotated[
        ConversationRef | None, BeforeValidator(lambda value: {"id": value} if isinstance(value, str) else value)
    ] = Field(None, description="An id, or an object with one: what it holds comes first, and it grows by this turn.")
    store: bool | None = Field(None, description="Whether to keep the response. Default: if a history is kept.")
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_COUNT, description="Default: a fifth of the context.")
    metadata: Metadata = Field(default_factory=dict)
    include: list[Includable] = Field(
        default_factory=list,
        description="With message.output_text.logprobs the logprob of each token. Others change nothing: all that is "
        "there is shown.",
    )
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_COUNT, description="With logprobs: number of likeliest tokens to return at each position."
    )
    text: TextConfig = TextConfig()
    tools: Annotated[list[FunctionTool], offered("function")] = Field(
        default_factory=list, max_length=MAX_TOOLS, description="Functions that the model may call."
    )
    tool_choice: ResponseToolChoice = Field("auto", description="none, auto, required, a function, or allowed_tools.")
    parallel_tool_calls: bool = Field(True, description="Whether an answer may call more than one function.")
    max_tool_calls: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="Of tools that run at OpenAI, of which there are none here."
    )
    chat_template_kwargs: TemplateSettings = None
    reasoning: Reasoning = Field(Reasoning(), description="Its effort is for models whose chat template knows it.")
    prompt_cache_options: CacheOptions | None = Field(
        None, description="Computes a prompt without an answer, or asks why it was not found in the caches."
    )
    truncation: Literal["auto", "disabled"] = Field(
        "disabled", description="auto: the oldest turns are left out if the context is too short for all."
    )

    def grammar(self) -> Grammar | None:
        """The answer's format, in this API's words or in vLLM's."""
        if self.response_format is not None:
            raise InvalidRequestError("response_format is called text.format here", param="response_format")
        return either_grammar(output_grammar(self.text.format), super().grammar())

    def template_settings(self, known: Collection[str]) -> dict[str, Any]:
        """Values for the chat template, by name. known: names that it uses."""
        return effort_settings(self.reasoning.effort, known) | (self.chat_template_kwargs or {})

    @property
    def prewarms(self) -> bool:
        """True if the prompt is computed and nothing is generated."""
        return self.prompt_cache_options is not None and self.prompt_cache_options.prewarm

    @property
    def comparison_response_id(self) -> str | None:
        """The response that the prompt is compared with."""
        return None if self.prompt_cache_options is None else self.prompt_cache_options.comparison_response_id

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if "message.output_text.logprobs" in self.include else None

    @property
    def tool_use(self) -> ToolUse | None:
        """How an answer may use tools; None if it may not. Raises InvalidRequestError."""
        return response_tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    @model_validator(mode="after")
    def _has_a_question(self) -> ResponsesRequest:
        if self.previous_response_id is not None and self.conversation is not None:
            raise ValueError("previous_response_id and conversation cannot be given together")
        if not (self.input or self.previous_response_id or self.conversation):
            raise ValueError("input is missing or empty")
        return self

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> ResponsesRequest:
        if self.top_logprobs and self.wanted_logprobs is None:
            raise InvalidRequestError(
                "top_logprobs needs include to have message.output_text.logprobs", param="top_logprobs"
            )
        return self


class InputTokensDetails(msgspec.Struct):
    """What the prompt cost, as in chat completions."""

    cached_tokens: int
    images: int
    images_encoded: int
    image_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """What the answer cost."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """Tokens of the prompt and of the answer."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> ResponseUsage:
        """The same in this API's words."""
        prompt = usage.prompt_tokens_details
        return cls(
            usage.prompt_tokens,
            InputTokensDetails(prompt.cached_tokens, prompt.images, prompt.images_encoded, prompt.image_tokens),
            usage.completion_tokens,
            OutputTokensDetails(usage.completion_tokens_details.reasoning_tokens),
            usage.total_tokens,
        )


class CacheDiagnostics(msgspec.Struct):
    """Why a prompt could not reuse all of the one that it is compared with. type: cache_miss, cache_hit,
    comparison_response_not_found or unavailable.

    detail, changed: beyond OpenAI's fields: a reason that its types lack, and the first part that changed.
    """

    type: str
    reason: str | msgspec.UnsetType = msgspec.UNSET
    cache_missed_tokens: int | msgspec.UnsetType = msgspec.UNSET
    comparison_reusable_tokens: int | msgspec.UnsetType = msgspec.UNSET
    detail: str | msgspec.UnsetType = msgspec.UNSET
    changed: Changed | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def of(cls, miss: Miss | None) -> CacheDiagnostics:
        """A miss in this API's words; None: a hit."""
        if miss is None:
            return cls("cache_hit")
        if miss.reason in _CHANGES:
            changed = msgspec.UNSET if miss.changed is None else miss.changed
            counts = miss.missed_tokens, miss.reusable_tokens
            return cls("cache_miss", _CHANGES[miss.reason], *counts, changed=changed)
        return cls("unavailable", detail=DETAILS[miss.reason])


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response. What vlmserve does not do has the value that says so. image_sizes: of the prompt's images, in order,
    those of earlier turns included; left out until the end, and if there are none. confidence: of an answer in JSON, if
    its logprobs are asked for, a probability in the place of each value; null if it is no whole JSON; left out for
    other answers."""

    id: str
    object: str = "response"
    created_at: int
    status: str = "in_progress"
    completed_at: int | None = None
    background: bool = False
    conversation: dict[str, str] | None = None
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_diagnostics: CacheDiagnostics | msgspec.UnsetType = msgspec.UNSET
    reasoning: dict[str, str | None]
    service_tier: str = "default"
    store: bool
    temperature: float
    text: dict[str, Any] = msgspec.field(default_factory=lambda: {"format": {"type": "text"}, "verbosity": "medium"})
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = []
    top_logprobs: int = 0
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: None = None
    image_sizes: list[ImageSize] | msgspec.UnsetType = msgspec.UNSET
    confidence: Any = msgspec.UNSET
