"""Tools and tool calls in OpenAI's form: https://platform.openai.com/docs/guides/function-calling"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, Discriminator, Field, Tag

from vlmserve.errors import InvalidRequestError
from vlmserve.frontend.tools import Function, ToolUse
from vlmserve.server.schema.base import JSONObject, RequestModel, log_once

MAX_TOOLS = 128
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class FunctionDefinition(RequestModel):
    """A function that can be called. parameters: JSON schema of its arguments; default: no arguments."""

    name: Name
    description: str | None = None
    parameters: JSONObject | None = None
    strict: bool = False

    @property
    def function(self) -> Function:
        return Function(self.name, self.description, self.parameters, self.strict)


class Tool(RequestModel):
    """A function that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(RequestModel):
    name: str


class NamedTool(RequestModel):
    type: Literal["function"]
    function: FunctionName


def choice_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "<word>"
    kind = value.get("type", "") if isinstance(value, dict) else getattr(value, "type", None)
    return "<allowed>" if kind == "allowed_tools" else "<named>" if isinstance(kind, str) else None


class AllowedFunctions(RequestModel):
    """The functions that may be called. mode: whether one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(RequestModel):
    """The functions that may be called. The prompt describes all functions, so that it stays the same."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


Word = Annotated[Literal["none", "auto", "required"], Tag("<word>")]
BY_KIND_OF_CHOICE = Discriminator(
    choice_kind,
    custom_error_type="tool_choice",
    custom_error_message="must be 'none', 'auto', 'required', or an object of type function or allowed_tools",
)
ToolChoice = Annotated[
    Word | Annotated[NamedTool, Tag("<named>")] | Annotated[AllowedTools, Tag("<allowed>")], BY_KIND_OF_CHOICE
]


class CalledFunction(RequestModel):
    """A called function. arguments: JSON."""

    name: Annotated[str, Field(min_length=1)]
    arguments: str = "{}"


class SentToolCall(RequestModel):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None


def tool_use(functions: Sequence[Function], choice: str | NamedTool | None, parallel: bool) -> ToolUse | None:
    """None: no tools. Raises InvalidRequestError for tools that conflict with each other or with the choice."""
    if not functions:
        if isinstance(choice, NamedTool) or choice == "required":
            raise InvalidRequestError("tool_choice requires a call, but there are no tools", param="tool_choice")
        return None
    names: set[str] = set()
    for index, function in enumerate(functions):
        if function.name in names:
            raise InvalidRequestError(f"two tools have the name {function.name}", param=f"tools[{index}].function.name")
        names.add(function.name)
    if isinstance(choice, NamedTool):
        if choice.function.name not in names:
            raise InvalidRequestError(
                f"tool_choice names {choice.function.name!r:.100}, which is not among the tools", param="tool_choice"
            )
        return ToolUse(tuple(functions), must_call=True, parallel=False, allowed=frozenset({choice.function.name}))
    if choice == "none":
        return None
    return ToolUse(tuple(functions), must_call=choice == "required", parallel=parallel)


def allowed_tool_use(
    functions: Sequence[Function], names: Collection[str], mode: Literal["auto", "required"], parallel: bool
) -> ToolUse | None:
    """Raises InvalidRequestError like `tool_use`."""
    if unknown := sorted(set(names) - {function.name for function in functions}):
        raise InvalidRequestError(
            f"tool_choice allows {unknown[0]!r:.100}, which is not among the tools", param="tool_choice"
        )
    use = tool_use(functions, mode, parallel)
    return None if use is None else dataclasses.replace(use, allowed=frozenset(names))


def offered(kind: str) -> BeforeValidator:
    """Drop tools that only other servers run, and log each type once. Functions are checked later."""

    def offer(tools: Any) -> Any:
        if not isinstance(tools, list):
            return tools
        kept = []
        for tool in tools:
            other = tool.get("type", kind) if isinstance(tool, dict) else kind
            if isinstance(other, str) and other not in (kind, "function"):
                log_once("Tools of type", other, "cannot be offered to the model and are left out", logging.WARNING)
            else:
                kept.append(tool)
        return kept

    return BeforeValidator(offer)


class FunctionCall(msgspec.Struct, omit_defaults=True):
    """A function and its arguments as JSON, or their new part in a stream."""

    arguments: str | msgspec.UnsetType = msgspec.UNSET
    name: str | None = None


class AnswerToolCall(msgspec.Struct):
    id: str
    function: FunctionCall
    type: str = "function"


class DeltaToolCall(msgspec.Struct, omit_defaults=True):
    """The new part of a call in a stream. Only the first part has id, type and name."""

    index: int
    function: FunctionCall
    id: str | None = None
    type: str | None = None
