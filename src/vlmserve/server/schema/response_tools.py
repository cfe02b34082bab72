"""Tools of the Responses API, in its flat form: https://platform.openai.com/docs/guides/function-calling"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Tag, model_validator

from vlmserve.frontend.tools import ToolUse
from vlmserve.server.schema.base import RequestModel
from vlmserve.server.schema.tools import (
    BY_KIND_OF_CHOICE,
    MAX_TOOLS,
    FunctionDefinition,
    FunctionName,
    NamedTool,
    Word,
    allowed_tool_use,
    tool_use,
)


class Flat(RequestModel):
    """A function or its name. Rejects other types of tools, and the nested form of chat completions."""

    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _is_a_function(cls, value: Any) -> Any:
        if isinstance(value, dict):
            kind = value.get("type")
            if isinstance(kind, str) and kind != "function":
                raise ValueError(
                    f"has type {kind!r:.60}, which is not supported; only functions are, which your own program runs"
                )
            if "function" in value:
                raise ValueError("has no field function here; put name, description and parameters next to type")
        return value


class FunctionTool(Flat, FunctionDefinition):
    """A function that the model may call."""


class NamedFunction(Flat, FunctionName):
    """The name of a function."""


class AllowedTools(RequestModel):
    """The functions that may be called. mode: whether one must be.

    The prompt describes all functions, so that it stays the same.
    """

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS)]


ResponseToolChoice = Annotated[
    Word | Annotated[NamedFunction, Tag("<named>")] | Annotated[AllowedTools, Tag("<allowed>")], BY_KIND_OF_CHOICE
]


def response_tool_use(
    tools: Sequence[FunctionTool], choice: str | NamedFunction | AllowedTools, parallel: bool
) -> ToolUse | None:
    """The answer's use of tools; None: no tools.

    Raises InvalidRequestError for tools that conflict with each other or with the choice.
    """
    functions = [tool.function for tool in tools]
    if isinstance(choice, NamedFunction):
        return tool_use(functions, NamedTool(type="function", function=choice), parallel)
    if isinstance(choice, str):
        return tool_use(functions, choice, parallel)
    return allowed_tool_use(functions, [tool.name for tool in choice.tools], choice.mode, parallel)
