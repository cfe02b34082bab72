"""OpenAI's ``/v1/responses``: https://platform.openai.com/docs/api-reference/responses"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BeforeValidator, Field, model_validator

from vlmserve.errors import InvalidRequestError
from vlmserve.frontend.tools import ToolUse
from vlmserve.server.schema.asking import IGNORED_FIELDS
from vlmserve.server.schema.base import MAX_COUNT, RequestModel
from vlmserve.server.schema.caching import CacheDiagnostics, CachingRequest
from vlmserve.server.schema.content import PromptRequest, ReasoningEffort, TemplateSettings, effort_settings
from vlmserve.server.schema.items import Includable, Input, Metadata
from vlmserve.server.schema.response_tools import FunctionTool, ResponseToolChoice, response_tool_use
from vlmserve.server.schema.sampling import LIMIT_NAMES, NEUTRAL_VALUES, OTHER_NAMES
from vlmserve.server.schema.structured import OutputFormat, either_grammar, output_grammar
from vlmserve.server.schema.tools import MAX_TOOLS, offered
from vlmserve.server.schema.usage import Usage
from vlmserve.types import Grammar, ImageSize, Missed

_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL_VALUES,
    "background": (False,),
    "logprobs": (False,),
    "messages": (),
    "prompt": (),
}

_OTHER_NAMES: Mapping[str, str] = {
    **OTHER_NAMES,
    **dict.fromkeys((*LIMIT_NAMES, "max_tokens", "max_completion_tokens"), "max_output_tokens"),
    "reasoning_effort": "reasoning.effort",
}


class Reasoning(RequestModel):
    """How the model reasons before it answers."""

    ignored_fields: ClassVar[frozenset[str]] = frozenset({"context", "generate_summary", "mode"})

    effort: ReasoningEffort | None = None
    """For models whose chat template knows it; "none" also works with enable_thinking."""
    summary: Annotated[str, Field(max_length=64)] | None = None
    """It has no effect: reasoning is not summarized."""


class TextConfig(RequestModel):
    ignored_fields: ClassVar[frozenset[str]] = frozenset({"verbosity"})

    format: OutputFormat | None = None


class ConversationRef(RequestModel):
    id: str


class ResponsesRequest(PromptRequest, CachingRequest):
    """The body of ``POST /v1/responses``."""

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = _NEUTRAL_VALUES
    ignored_fields: ClassVar[frozenset[str]] = IGNORED_FIELDS - {"prompt_cache_options"} | {"context_management"}
    other_names: ClassVar[Mapping[str, str]] = _OTHER_NAMES
    content_fields: ClassVar[tuple[str, ...]] = ("input",)

    input: Input = Field(default_factory=list, description="A text, or items.")
    instructions: str | None = Field(None, description="System prompt of this response only.")
    previous_response_id: str | None = Field(None, description="The response that this one follows.")
    conversation: Annotated[
        ConversationRef | None, BeforeValidator(lambda value: {"id": value} if isinstance(value, str) else value)
    ] = Field(
        None, description="An id, or an object with one. The conversation precedes the input and gains this turn."
    )
    store: bool | None = Field(None, description="Store the response. Default: if the server keeps a history.")
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_COUNT, description="Default: a fifth of the context.")
    metadata: Metadata = Field(default_factory=dict)
    include: list[Includable] = Field(
        default_factory=list,
        description="message.output_text.logprobs adds logprobs. Others have no effect: items always have all parts.",
    )
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_COUNT, description="With logprobs: number of likeliest tokens to return at each position."
    )
    text: TextConfig = TextConfig()
    tools: Annotated[list[FunctionTool], offered("function")] = Field(
        default_factory=list, max_length=MAX_TOOLS, description="Functions that the model may call."
    )
    tool_choice: ResponseToolChoice = Field("auto", description="none, auto, required, a function, or allowed_tools.")
    parallel_tool_calls: bool = Field(True, description="Allow several calls in one answer.")
    max_tool_calls: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="Limit of OpenAI's built-in tools; no effect here."
    )
    chat_template_kwargs: TemplateSettings = None
    reasoning: Reasoning = Field(Reasoning(), description="Its effort is for models whose chat template knows it.")
    truncation: Literal["auto", "disabled"] = Field(
        "disabled", description="auto: drop the oldest turns if the context is too short."
    )

    def grammar(self) -> Grammar | None:
        """The answer's format, by this API's field, or vLLM's."""
        if self.response_format is not None:
            raise InvalidRequestError("response_format is called text.format here", param="response_format")
        return either_grammar(output_grammar(self.text.format), super().grammar())

    def template_settings(self, known: Collection[str]) -> dict[str, Any]:
        """Return values for the chat template. known: names that the template uses."""
        return effort_settings(self.reasoning.effort, known) | (self.chat_template_kwargs or {})

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if "message.output_text.logprobs" in self.include else None

    @property
    def tool_use(self) -> ToolUse | None:
        """The answer's use of tools; None: no tools. Raises InvalidRequestError."""
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
    """Details of input tokens, as in chat completions."""

    cached_tokens: int
    images: int
    images_encoded: int
    image_tokens: int
    cache_write_tokens: int = 0
    missed_tokens: Missed | msgspec.UnsetType = msgspec.UNSET


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> ResponseUsage:
        prompt = usage.prompt_tokens_details
        return cls(
            usage.prompt_tokens,
            InputTokensDetails(
                prompt.cached_tokens,
                prompt.images,
                prompt.images_encoded,
                prompt.image_tokens,
                missed_tokens=prompt.missed_tokens,
            ),
            usage.completion_tokens,
            OutputTokensDetails(usage.completion_tokens_details.reasoning_tokens),
            usage.total_tokens,
        )


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response. Fields of unsupported features keep their neutral values."""

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
    """Sizes of the prompt's images, in order, including earlier turns; absent before the end, and without images."""
    confidence: Any = msgspec.UNSET
    """JSON answers with logprobs: the answer with a probability in place of each value; null for incomplete JSON."""
