"""OpenAI's ``/v1/chat/completions``: https://platform.openai.com/docs/api-reference/chat"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from pydantic import Discriminator, Field, Tag, model_validator

from vlmserve.errors import InvalidRequestError
from vlmserve.frontend.tools import ToolUse
from vlmserve.server.schema.base import MAX_COUNT, RequestModel
from vlmserve.server.schema.caching import CacheDiagnostics, CachingRequest
from vlmserve.server.schema.content import (
    Message,
    PromptRequest,
    ReasoningEffort,
    TemplateSettings,
    TextPart,
    can_continue,
    check_continuation,
    effort_settings,
)
from vlmserve.server.schema.logprobs import ChoiceLogprobs, PromptLogprobs
from vlmserve.server.schema.sampling import NEUTRAL_VALUES, ChoicesRequest
from vlmserve.server.schema.tools import (
    MAX_TOOLS,
    AllowedTools,
    AnswerToolCall,
    DeltaToolCall,
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    NamedTool,
    Tool,
    ToolChoice,
    allowed_tool_use,
    offered,
    tool_use,
)
from vlmserve.server.schema.usage import Usage
from vlmserve.types import ImageSize

_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {**NEUTRAL_VALUES, "echo": (False,)}


class Prediction(RequestModel):
    """Text that the answer probably repeats, such as a file with a few changes."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(PromptRequest, ChoicesRequest, CachingRequest):
    """The body of ``POST /v1/chat/completions``."""

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = _NEUTRAL_VALUES
    content_fields: ClassVar[tuple[str, ...]] = ("messages",)

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_COUNT, description="Default: a fifth of the context.")
    max_tokens: int | None = Field(None, ge=1, le=MAX_COUNT, description="The older name of max_completion_tokens.")
    tools: Annotated[list[Tool], offered("function")] = Field(
        default_factory=list, max_length=MAX_TOOLS, description="Functions that the model may call."
    )
    tool_choice: ToolChoice | None = Field(None, description="none, auto, required or a function. Default: auto.")
    parallel_tool_calls: bool = Field(True, description="Allow several calls in one answer.")
    functions: list[FunctionDefinition] = Field(
        default_factory=list, max_length=MAX_TOOLS, description="The older form of tools."
    )
    function_call: (
        Annotated[
            Annotated[Literal["none", "auto"], Tag("<word>")] | Annotated[FunctionName, Tag("<named>")],
            Discriminator(lambda value: "<word>" if isinstance(value, str) else "<named>"),
        ]
        | None
    ) = Field(None, description="The older form of tool_choice.")

    chat_template_kwargs: TemplateSettings = None
    reasoning_effort: ReasoningEffort | None = Field(
        None, description="For models whose chat template has it; none also works with enable_thinking."
    )
    include_reasoning: bool = Field(True, description="Return the model's reasoning, if it reasons.")

    add_generation_prompt: bool | None = Field(
        None, description="End the prompt with the start of a new answer. Default: yes."
    )
    continue_final_message: bool | None = Field(
        None,
        description="Continue the last message. Default: if it is the assistant's text, without "
        "add_generation_prompt, response_format and a required tool call.",
    )

    prediction: Prediction | None = Field(
        None, description="Text that the answer probably repeats; makes answers on CPUs faster."
    )

    logprobs: bool = Field(False, description="Return the logprob of each token.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_COUNT, description="With logprobs: number of likeliest tokens to return at each position."
    )

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        return self

    def continues(self, last: dict[str, Any], tools: ToolUse | None) -> bool:
        """Return whether the answer continues the last message. Raises InvalidRequestError if it cannot."""
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise InvalidRequestError(
                    "continue_final_message and add_generation_prompt cannot both be true",
                    param="continue_final_message",
                )
            check_continuation(self.grammar(), tools)
            return True
        if self.continue_final_message is not None or self.add_generation_prompt is not None:
            return False
        return can_continue(last) and self.grammar() is None and not (tools is not None and tools.must_call)

    @property
    def uses_functions(self) -> bool:
        """True if the request uses `functions`, the older form of tools."""
        return bool(self.functions) and not self.tools

    @property
    def tool_use(self) -> ToolUse | None:
        """The answer's use of tools; None: no tools. Raises InvalidRequestError, naming the field."""
        if self.uses_functions:
            wanted = self.function_call
            choice = NamedTool(type="function", function=wanted) if isinstance(wanted, FunctionName) else wanted
            return tool_use([function.function for function in self.functions], choice, parallel=False)
        functions = [tool.function.function for tool in self.tools]
        if isinstance(self.tool_choice, AllowedTools):
            allowed = self.tool_choice.allowed_tools
            names = [tool.function.name for tool in allowed.tools]
            return allowed_tool_use(functions, names, allowed.mode, self.parallel_tool_calls)
        return tool_use(functions, self.tool_choice, self.parallel_tool_calls)

    def template_settings(self, known: Collection[str]) -> dict[str, Any]:
        """Return values for the chat template. known: names that the template uses."""
        return effort_settings(self.reasoning_effort, known) | (self.chat_template_kwargs or {})

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class AnswerMessage(msgspec.Struct):
    """The model's answer."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[AnswerToolCall] | msgspec.UnsetType = msgspec.UNSET
    function_call: FunctionCall | msgspec.UnsetType = msgspec.UNSET
    """The call in its older form, if the request has `functions`."""
    reasoning_content: str | None = None
    """The reasoning before the answer. `reasoning` is the same: clients read either name."""
    reasoning: str | None = None


class AnswerChoice(msgspec.Struct):
    """One of the n answers."""

    index: int
    message: AnswerMessage
    finish_reason: str
    logprobs: ChoiceLogprobs | None = None
    confidence: Any = msgspec.UNSET
    """JSON answers with logprobs: the answer with a probability in place of each value; null for incomplete JSON."""
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct):
    """The response without ``stream``."""

    id: str
    created: int
    model: str
    choices: list[AnswerChoice]
    usage: Usage
    object: str = "chat.completion"
    image_sizes: list[ImageSize] | msgspec.UnsetType = msgspec.UNSET
    """Sizes of the prompt's images, in order; absent without images."""
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_cache_diagnostics: CacheDiagnostics | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Delta(msgspec.Struct, omit_defaults=True):
    """The new part of an answer in a stream."""

    role: str | None = None
    content: str | None = None
    tool_calls: list[DeltaToolCall] | None = None
    function_call: FunctionCall | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChunkChoice(msgspec.Struct):
    """An answer's part in an event of a stream. confidence: as in `AnswerChoice`, only in the last one."""

    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: ChoiceLogprobs | None = None
    confidence: Any = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(msgspec.Struct):
    """An event of the response with ``stream``. The last one has the image sizes.

    usage: only if requested, and null in all events but the last.
    """

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    object: str = "chat.completion.chunk"
    image_sizes: list[ImageSize] | msgspec.UnsetType = msgspec.UNSET
    prompt_cache_diagnostics: CacheDiagnostics | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
