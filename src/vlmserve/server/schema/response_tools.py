"""Tools in the Responses API, which writes them flat: https://platform.openai.com/docs/guides/function-calling"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from vlmserve.errors import InvalidRequestError
from vlmserve.frontend.tools import ToolUse
from vlmserve.server.schema.base import RequestModel
from vlmserve.server.schema.tools import MAX_TOOLS, FunctionDefinition, FunctionName, NamedTool, tool_use


class Flat(RequestModel):
    """Something of a function, beside its type. OpenAI's other tools are refused by name, and so is what is written as
    in chat completions."""

    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _is_a_function(cls, value: Any) -> Any:
        if isinstance(value, dict):
            kind = value.get("type")
            if isinstance(kind, str) and kind != "function":
                raise ValueError(
                    f"Tools of type {kind!r:.60} are not supported here, only functions, which your own program runs"
                )
            if "function" in value:
                raise ValueError("The fields of a function are beside type here, not in a field function")
        return value


class FunctionTool(Flat, FunctionDefinition):
    """A function that the model may call."""


class NamedFunction(Flat, FunctionName):
    """One of the functions."""


class AllowedTools(RequestModel):
    """Those of the functions that may be called; the prompt describes all, so that it stays the same. mode:
    whether one of them has to be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS)]


def _choice_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "<word>"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<allowed>" if kind == "allowed_tools" else "<named>" if isinstance(kind, str) else None


ResponseToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedFunction, Tag("<named>")]
    | Annotated[AllowedTools, Tag("<allowed>")],
    Discriminator(
        _choice_kind,
        custom_error_type="tool_choice",
        custom_error_message="Input should be 'none', 'auto', 'required', or an object of type function or "
        "allowed_tools",
    ),
]


def response_tool_use(
    tools: Sequence[FunctionTool], choice: str | NamedFunction | AllowedTools, parallel: bool
) -> ToolUse | None:
    """How an answer may use tools; None if it may not. Raises InvalidRequestError for tools that contradict each other
    or the choice, in the words of chat completions."""
    functions = [tool.function for tool in tools]
    if isinstance(choice, NamedFunction):
        return tool_use(functions, NamedTool(type="function", function=choice), parallel)
    if isinstance(choice, str):
        return tool_use(functions, choice, parallel)
    allowed = frozenset(tool.name for tool in choice.tools)
    if unknown := sorted(allowed - {tool.name for tool in tools}):
        raise InvalidRequestError(
            f"tool_choice allows {unknown[0]!r:.100}, which is not among the tools", param="tool_choice"
        )
    use = tool_use(functions, choice.mode, parallel)
    return None if use is None else dataclasses.replace(use, allowed=allowed)
