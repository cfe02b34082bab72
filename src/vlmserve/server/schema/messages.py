"""Anthropic's ``/v1/messages``: https://docs.anthropic.com/en/api/messages"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field

from vlmserve.frontend.conversations import thinking_settings
from vlmserve.frontend.tools import Function, ToolUse
from vlmserve.server.cache_diagnosis import Changed, Miss
from vlmserve.server.schema.asking import IGNORED_FIELDS
from vlmserve.server.schema.base import MAX_COUNT, ByType, JSONObject, RequestModel
from vlmserve.server.schema.blocks import ChatMessages, System, Turn
from vlmserve.server.schema.caching import Prewarming
from vlmserve.server.schema.content import PromptRequest
from vlmserve.server.schema.sampling import NEUTRAL_VALUES, OTHER_NAMES, SamplingRequest
from vlmserve.server.schema.structured import MessagesFormat, either_grammar
from vlmserve.server.schema.tools import MAX_TOOLS, FunctionName, NamedTool, offered, tool_use
from vlmserve.types import Grammar, ImageSize

_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "container": (),
    "logprobs": (False,),
    "mcp_servers": (),
    "thread": (),
    "top_logprobs": (0,),
}
_IGNORED_FIELDS = frozenset({"betas", "cache_control", "context_management"})
_CHANGES = ("model", "system", "tools", "messages")
"""Cache-miss reasons of Anthropic's API."""


ThinkingDisplay = Literal["summarized", "omitted"] | None
"""Return or omit reasoning. "summarized" returns all of it."""


class CustomTool(RequestModel):
    """A tool of the client. input_examples: shown to the model with the schema."""

    ignored_fields: ClassVar[frozenset[str]] = frozenset(
        {"allowed_callers", "cache_control", "defer_loading", "eager_input_streaming"}
    )

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    input_schema: JSONObject
    description: str | None = None
    type: Literal["custom"] = "custom"
    strict: bool = False
    input_examples: list[JSONObject] = Field(default_factory=list)

    @property
    def function(self) -> Function:
        examples = {"examples": self.input_examples} if self.input_examples else {}
        return Function(self.name, self.description, {**self.input_schema, **examples}, self.strict)


class ToolChoice(RequestModel):
    """The use of tools, and whether an answer may make several calls."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool = False


class NamedToolChoice(RequestModel):
    """The one tool that the answer calls, once."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool = False


class ThinkingEnabled(RequestModel):
    """The model reasons before it answers. budget_tokens: maximum tokens of reasoning."""

    type: Literal["enabled"]
    budget_tokens: int = Field(ge=0, le=MAX_COUNT)
    display: ThinkingDisplay = None


class ThinkingAdaptive(RequestModel):
    type: Literal["adaptive"]
    display: ThinkingDisplay = None


class ThinkingDisabled(RequestModel):
    """The model does not reason, if its chat template has a switch for it."""

    type: Literal["disabled", "between_tools"]


class PromptFields(PromptRequest):
    thinking: Annotated[ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled, ByType()] | None = Field(
        None, description="Reason before the answer, and how long. Default: no, if the model has a switch."
    )

    messages: Annotated[list[Turn], Field(min_length=1)]
    system: System = ""
    tools: Annotated[list[CustomTool], offered("custom")] = Field(
        default_factory=list, max_length=MAX_TOOLS, description="Tools that the model may call."
    )
    tool_choice: Annotated[ToolChoice | NamedToolChoice, ByType()] | None = Field(
        None, description="auto, any, none or a tool. Default: auto."
    )

    def template_settings(self, known: Collection[str]) -> dict[str, Any]:
        """Return values for the chat template. known: names that the template uses."""
        return thinking_settings(isinstance(self.thinking, ThinkingEnabled | ThinkingAdaptive), known)

    def chat(self) -> ChatMessages:
        return ChatMessages(self.system, self.messages)

    @property
    def tool_use(self) -> ToolUse | None:
        """The answer's use of tools; None: no tools. Raises InvalidRequestError, naming the field."""
        choice = self.tool_choice
        wanted: str | NamedTool | None = None
        if isinstance(choice, NamedToolChoice):
            wanted = NamedTool(type="function", function=FunctionName(name=choice.name))
        elif choice is not None:
            wanted = "required" if choice.type == "any" else choice.type
        parallel = choice is None or not choice.disable_parallel_tool_use
        return tool_use([tool.function for tool in self.tools], wanted, parallel)


class OutputConfig(RequestModel):
    ignored_fields: ClassVar[frozenset[str]] = frozenset({"effort", "task_budget"})

    format: MessagesFormat | None = None


class DiagnosticsWanted(RequestModel):
    """Asks why the cache lacked a part of the prompt.

    previous_message_id: an answer to compare with, which also had diagnostics; null for the first request.
    """

    previous_message_id: str | None = None


class MessagesRequest(PromptFields, SamplingRequest):
    """The body of ``POST /v1/messages``."""

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {**NEUTRAL_VALUES, **_NEUTRAL_VALUES}
    ignored_fields: ClassVar[frozenset[str]] = IGNORED_FIELDS | _IGNORED_FIELDS
    other_names: ClassVar[Mapping[str, str]] = {**OTHER_NAMES, "max_completion_tokens": "max_tokens"}
    content_fields: ClassVar[tuple[str, ...]] = ("messages", "system")

    max_tokens: int | None = Field(None, ge=1, le=MAX_COUNT, description="Default: a fifth of the context.")
    stop_sequences: list[str] = Field(default_factory=list, description="Strings that end the answer.")
    output_config: OutputConfig = OutputConfig()
    diagnostics: DiagnosticsWanted | None = Field(None, description="Ask why the caches lacked a part of the prompt.")
    prompt_cache_options: Prewarming = Field(
        Prewarming(), description="prewarm computes the prompt and generates nothing."
    )

    @property
    def prewarms(self) -> bool:
        """True if the prompt is computed and nothing is generated."""
        return self.prompt_cache_options.prewarm

    @property
    def thinking_budget(self) -> int | None:
        return self.thinking.budget_tokens if isinstance(self.thinking, ThinkingEnabled) else self.thinking_token_budget

    @property
    def shows_thoughts(self) -> bool:
        return getattr(self.thinking, "display", None) != "omitted"

    def grammar(self) -> Grammar | None:
        """The answer's format, by this API's field, or vLLM's and OpenAI's."""
        wanted = self.output_config.format
        return either_grammar(None if wanted is None else wanted.grammar, super().grammar())


class CountRequest(PromptFields):
    """The body of ``POST /v1/messages/count_tokens``: same as ``/v1/messages``, but only the prompt matters."""

    ignored_fields: ClassVar[frozenset[str]] = MessagesRequest.ignored_fields | MessagesRequest.model_fields.keys()

    model: str | None = None
    output_config: OutputConfig | None = None


class OutputTokensDetails(msgspec.Struct):
    """Details of output tokens. thinking_tokens: reasoning."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct):
    """Token counts. input_tokens does not include cached tokens; image_tokens counts the whole prompt."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    image_tokens: int
    output_tokens_details: OutputTokensDetails
    cache_creation_input_tokens: int = 0


class TextContent(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ThinkingContent(msgspec.Struct, tag_field="type", tag="thinking"):
    """Reasoning before the answer. signature: always empty."""

    thinking: str
    signature: str = ""


class ToolUseContent(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A tool call. input: a JSON object, as the model wrote it."""

    id: str
    name: str
    input: Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema={"type": "object"})]


class CacheMissReason(msgspec.Struct):
    """Why a prompt could not reuse all of an earlier one."""

    type: str
    cache_missed_input_tokens: int | msgspec.UnsetType = msgspec.UNSET
    """Tokens of the earlier prompt that could not be reused."""
    detail: str | msgspec.UnsetType = msgspec.UNSET
    """A reason that Anthropic's types lack (vlmserve's extension)."""
    changed: Changed | msgspec.UnsetType = msgspec.UNSET
    """The first part that changed (vlmserve's extension)."""
    seconds_since_eviction: float | msgspec.UnsetType = msgspec.UNSET
    """With the detail evicted (vlmserve's extension)."""

    @classmethod
    def of(cls, miss: Miss) -> CacheMissReason:
        if miss.reason in _CHANGES:
            return cls(f"{miss.reason}_changed", miss.lost_tokens, **miss.details())
        return cls("unavailable", **miss.details())


class Diagnostics(msgspec.Struct):
    """Why the cache lacked a part of the prompt."""

    cache_miss_reason: CacheMissReason


class MessageAnswer(msgspec.Struct):
    """The response without ``stream``. image_sizes: of the prompt's images, in order; absent without images."""

    id: str
    model: str
    content: list[ThinkingContent | TextContent | ToolUseContent]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    type: str = "message"
    role: str = "assistant"
    diagnostics: Diagnostics | None = None
    image_sizes: list[ImageSize] | msgspec.UnsetType = msgspec.UNSET


class TokenCount(msgspec.Struct):
    """The response of ``/v1/messages/count_tokens``."""

    input_tokens: int
