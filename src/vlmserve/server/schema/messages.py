"""``/v1/messages``, as Anthropic writes it: https://docs.anthropic.com/en/api/messages"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from pydantic import Field, Tag, model_validator

from vlmserve.server.schema.base import MAX_COUNT, RequestModel, by_type, text_or_list
from vlmserve.server.schema.sampling import SamplingRequest

_IGNORED_FIELDS = frozenset({"cache_control", "metadata", "service_tier"})
_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": (),
    "mcp_servers": ([],),
    "output_config": ({},),
    "thinking": ({"type": "disabled"},),
    "tool_choice": ({"type": "none"}, {"type": "auto"}),
    "tools": ([],),
}


class Block(RequestModel):
    """A part of a message. cache_control is accepted and changes nothing: all that can be cached is."""

    cache_control: dict[str, Any] | None = None


class TextBlock(Block):
    """A piece of text."""

    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class Base64Source(RequestModel):
    """A picture's file."""

    type: Literal["base64"]
    media_type: str
    data: str


class URLSource(RequestModel):
    """Where a picture's file is."""

    type: Literal["url"]
    url: str


class ImageBlock(Block):
    """A picture."""

    type: Literal["image"]
    source: Annotated[
        Annotated[Base64Source, Tag("<base64>")] | Annotated[URLSource, Tag("<url>")],
        by_type("base64", "url"),
    ]

    def part(self) -> dict[str, Any]:
        """The same as OpenAI writes it."""
        if isinstance(self.source, URLSource):
            url = self.source.url
        else:
            url = f"data:{self.source.media_type};base64,{self.source.data}"
        return {"type": "image_url", "image_url": {"url": url}}


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[ImageBlock, Tag("<image>")],
    by_type("text", "image"),
]


System = Annotated[Annotated[str, Tag("<text>")] | Annotated[list[TextBlock], Tag("<list>")], text_or_list("blocks")]
"""What is said before the conversation."""


class Turn(RequestModel):
    """One turn of a conversation."""

    role: Literal["user", "assistant"]
    content: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[list[ContentBlock], Field(min_length=1), Tag("<list>")],
        text_or_list("blocks"),
    ]


class CountRequest(RequestModel):
    """The body of ``POST /v1/messages/count_tokens``."""

    messages: Annotated[list[Turn], Field(min_length=1)]
    model: str | None = None
    system: System = ""

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as `RequestPreparer.chat` takes them."""
        return turns_as_chat(self.system, self.messages)


class MessagesRequest(SamplingRequest):
    """The body of ``POST /v1/messages``."""

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = _NEUTRAL_VALUES
    ignored_fields: ClassVar[frozenset[str]] = _IGNORED_FIELDS
    content_fields: ClassVar[tuple[str, ...]] = ("messages", "system")

    messages: Annotated[list[Turn], Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=1, le=MAX_COUNT, description="Default: a fifth of the context.")
    system: System = ""
    stop_sequences: list[str] = Field(default_factory=list, description="Up to 16.")

    @model_validator(mode="after")
    def _ends_with_a_question(self) -> Self:
        if self.messages[-1].role == "assistant":
            raise ValueError("The last message should be the user's: answers that are begun cannot be continued here")
        return self

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as `RequestPreparer.chat` takes them."""
        return turns_as_chat(self.system, self.messages)


def turns_as_chat(system: str | Sequence[TextBlock], turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Messages as `RequestPreparer.chat` takes them."""
    instructions = system if isinstance(system, str) else "\n".join(block.text for block in system)
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    for turn in turns:
        if isinstance(turn.content, str):
            messages.append({"role": turn.role, "content": turn.content})
            continue
        parts = [
            block.part() if isinstance(block, ImageBlock) else {"type": "text", "text": block.text}
            for block in turn.content
        ]
        messages.append({"role": turn.role, "content": parts})
    return messages


class MessageUsage(msgspec.Struct):
    """Tokens, those of the prompt that were cached counted apart."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class TextContent(msgspec.Struct):
    """What the model said."""

    text: str
    type: str = "text"


class MessageAnswer(msgspec.Struct):
    """The response without ``stream``."""

    id: str
    model: str
    content: list[TextContent]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    type: str = "message"
    role: str = "assistant"


class TokenCount(msgspec.Struct):
    """The response of ``/v1/messages/count_tokens``."""

    input_tokens: int
