"""Anthropic's messages and content blocks: https://docs.anthropic.com/en/api/messages"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from vlmserve.errors import InvalidRequestError
from vlmserve.media.budget import BUDGET_FIELDS
from vlmserve.server.schema.base import ByType, JSONObject, RequestModel, TextOrList, log_once
from vlmserve.server.schema.content import Budget, Pages, thoughts_of

_PATH = re.compile(r"(?:messages|tools)\[\d+\](?:\.\w+|\[\d+\])*")
_OWNER = re.compile(r"messages\[\d+\](?:\.(?:content|tool_calls)\[\d+\])?")
"""The part of a path that identifies a block."""
_OWN_FIELDS: Mapping[str, str] = {
    ".function.arguments": ".input",
    ".function.name": ".name",
    ".function.parameters": ".input_schema",
    ".file.file_data": ".source",
    ".file.file_url": ".source",
    ".image_url.url": ".source",
    ".tool_call_id": ".tool_use_id",
}


class Block(RequestModel):
    ignored_fields: ClassVar[frozenset[str]] = frozenset(
        {"cache_control", "caller", "citations", "encrypted_content", "signature"}
    )


class TextBlock(Block):
    type: Literal["text"]
    text: str

    def parts(self) -> list[dict[str, Any]]:
        return [{"type": "text", "text": self.text}]


class Base64Source(RequestModel):
    type: Literal["base64"]
    media_type: str
    data: str


class URLSource(RequestModel):
    type: Literal["url"]
    url: str


class UploadedSource(RequestModel):
    """A file that was uploaded to /v1/files."""

    type: Literal["file"]
    file_id: str


class ImageBlock(Block, Budget):
    type: Literal["image"]
    source: Annotated[Base64Source | URLSource | UploadedSource, ByType()]

    def parts(self) -> list[dict[str, Any]]:
        if isinstance(self.source, UploadedSource):
            return [{"type": "file", "file": {"file_id": self.source.file_id}, **_budget(self)}]
        if isinstance(self.source, URLSource):
            url = self.source.url
        else:
            url = f"data:{self.source.media_type};base64,{self.source.data}"
        return [{"type": "image_url", "image_url": {"url": url}, **_budget(self)}]


def _budget(block: Budget) -> dict[str, int]:
    return block.model_dump(include=set(BUDGET_FIELDS), exclude_none=True)


class TextSource(RequestModel):
    """A plain-text document."""

    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str


class ContentSource(RequestModel):
    """A document of text and images."""

    type: Literal["content"]
    content: Annotated[str | list[Annotated[TextBlock | ImageBlock, ByType()]], TextOrList("blocks")]


class DocumentBlock(Block, Budget):
    """A document. Each page of a PDF becomes an image. Its title and context precede it as text.

    Answers have no citations.
    """

    type: Literal["document"]
    source: Annotated[Base64Source | URLSource | TextSource | ContentSource | UploadedSource, ByType()]
    title: str | None = None
    context: str | None = None
    pages: Pages = None

    def parts(self) -> list[dict[str, Any]]:
        source = self.source
        texts = [text for text in (self.title, self.context) if text]
        if isinstance(source, ContentSource) and isinstance(source.content, list):
            shown = [part for block in source.content for part in block.parts()]
            return [*({"type": "text", "text": text} for text in texts), *shown]
        if isinstance(source, TextSource | ContentSource):
            text = source.data if isinstance(source, TextSource) else str(source.content)
            return [{"type": "text", "text": "\n\n".join([*texts, text])}]
        if isinstance(source, UploadedSource):
            file = {"file_id": source.file_id}
        elif isinstance(source, URLSource):
            file = {"file_url": source.url}
        else:
            file = {"file_data": f"data:{source.media_type};base64,{source.data}"}
        pages = {"pages": self.pages} if self.pages is not None else {}
        document = {"type": "file", "file": file, **pages, **_budget(self)}
        return [*({"type": "text", "text": text} for text in texts), document]


class SearchResultBlock(Block):
    """A result of the client's search, shown to the model as text."""

    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock]

    def parts(self) -> list[dict[str, Any]]:
        texts = [self.title, self.source, *(block.text for block in self.content)]
        return [{"type": "text", "text": "\n".join(texts)}]


class ToolReferenceBlock(Block):
    """The name of a tool that a tool search found. The prompt describes all tools anyway."""

    type: Literal["tool_reference"]
    tool_name: str

    def parts(self) -> list[dict[str, Any]]:
        return [{"type": "text", "text": self.tool_name}]


class CompactionBlock(Block):
    """A summary of an earlier part of the conversation."""

    type: Literal["compaction"]
    content: str | None = None

    def parts(self) -> list[dict[str, Any]]:
        return [{"type": "text", "text": self.content}] if self.content else []


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str
    name: Annotated[str, Field(min_length=1)]
    input: JSONObject

    def call(self) -> dict[str, Any]:
        """Return the tool call of chat completions, with the arguments as an object."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.input}}


class ThinkingBlock(Block):
    """Reasoning before an answer. Chat templates may show it to the model again."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Block):
    """Reasoning that another server encrypted; it is not shown to the model."""

    type: Literal["redacted_thinking"]
    data: str


ShownBlock = Annotated[TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock, ByType()]


class ToolResultBlock(Block):
    """The result of a tool call. is_error: the prompt says that the call failed."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[str | list[ShownBlock], TextOrList("blocks")] = ""
    is_error: bool = False


_LEFT_OUT = frozenset(
    "bash_code_execution_tool_result code_execution_tool_result container_upload fallback mcp_tool_result mcp_tool_use "
    "server_tool_use text_editor_code_execution_tool_result tool_search_tool_result web_fetch_tool_result "
    "web_search_tool_result".split()
)
"""Blocks about tools that another server ran."""


def _as_known(block: Any) -> Any:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str) or kind not in _LEFT_OUT:
        return block
    log_once("Blocks of type", kind, "cannot be shown to the model and are left out", logging.WARNING)
    return {"type": "redacted_thinking", "data": ""}  # keeps the indices of other blocks


ContentBlock = Annotated[
    TextBlock
    | ImageBlock
    | DocumentBlock
    | ToolUseBlock
    | ToolResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | SearchResultBlock
    | ToolReferenceBlock
    | CompactionBlock,
    ByType(),
    BeforeValidator(_as_known),
]
_Said = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock | CompactionBlock
"""Blocks that the model sees as text and images."""


System = Annotated[str | list[TextBlock], TextOrList("blocks")]
"""The system prompt."""


class Turn(RequestModel):
    """A message. Only the assistant calls tools, only the user returns results, and the system has only text."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[str | Annotated[list[ContentBlock], Field(min_length=1)], TextOrList("blocks")]

    @model_validator(mode="after")
    def _says_what_its_role_may(self) -> Self:
        for index, block in enumerate(self.content if isinstance(self.content, list) else ()):
            if isinstance(block, ToolUseBlock | ThinkingBlock) and self.role != "assistant":
                raise ValueError(f"content[{index}] is a {block.type}, which belongs in a message of the assistant")
            if isinstance(block, ToolResultBlock) and self.role != "user":
                raise ValueError(f"content[{index}] is a tool_result, which belongs in a message of the user")
            if isinstance(block, ImageBlock | DocumentBlock) and self.role == "system":
                raise ValueError(f"content[{index}] is a {block.type}, which belongs in a message of the user")
        return self


Placed = tuple[str, dict[str, Any]]
"""The path of a block in the request, and the part or call that was made of it."""


class ChatMessages:
    def __init__(self, system: str | Sequence[TextBlock], turns: Sequence[Turn]) -> None:
        self.messages: list[dict[str, Any]] = []
        self._places: dict[str, str] = {}
        instructions = system if isinstance(system, str) else "\n".join(block.text for block in system)
        if instructions:
            self._add("system", "system", instructions)
        for index, turn in enumerate(turns):
            place = f"messages[{index}]"
            if isinstance(turn.content, str):
                self._add(place, turn.role, turn.content)
                continue
            blocks = [(f"{place}.content[{number}]", block) for number, block in enumerate(turn.content)]
            if turn.role == "assistant":
                self._add_answer(place, blocks)
            else:
                self._add_question(place, blocks, turn.role)

    @property
    def ends_with_answer(self) -> bool:
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"

    def _add_answer(self, place: str, blocks: Sequence[tuple[str, ContentBlock]]) -> None:
        said = [(at, block) for at, block in blocks if isinstance(block, _Said)]
        calls = [(at, block.call()) for at, block in blocks if isinstance(block, ToolUseBlock)]
        texts = [block.text for _, block in said if isinstance(block, TextBlock)]
        content = "".join(texts) if len(texts) == len(said) else _placed_parts(said)
        thoughts = "\n\n".join(block.thinking for _, block in blocks if isinstance(block, ThinkingBlock))
        self._add(place, "assistant", content, calls, **thoughts_of(thoughts))

    def _add_question(self, place: str, blocks: Sequence[tuple[str, ContentBlock]], role: str) -> None:
        """Make messages of each tool result, and of the content around results."""
        said: list[Placed] = []
        for at, block in blocks:
            if isinstance(block, _Said):
                said += _placed_parts([(at, block)])
            elif isinstance(block, ToolResultBlock):
                if said:
                    self._add(place, role, said)
                    said = []
                self._add(at, "tool", _result(at, block), tool_call_id=block.tool_use_id)
        if said:
            self._add(place, role, said)

    def _add(
        self, place: str, role: str, content: str | Sequence[Placed], calls: Sequence[Placed] = (), **fields: str
    ) -> None:
        """place: the message's path in the request, for errors."""
        at = f"messages[{len(self.messages)}]"
        self._places[at] = place
        message: dict[str, Any] = {"role": role, "content": content, **fields}
        if not isinstance(content, str):
            message["content"] = self._placed(f"{at}.content", content)
        if calls:
            message["tool_calls"] = self._placed(f"{at}.tool_calls", calls)
        self.messages.append(message)

    def _placed(self, at: str, parts: Sequence[Placed]) -> list[dict[str, Any]]:
        self._places |= {f"{at}[{index}]": place for index, (place, _) in enumerate(parts)}
        return [part for _, part in parts]

    def reword(self, error: InvalidRequestError) -> None:
        """Replace paths and fields of chat completions by the request's own."""
        error.args = (_PATH.sub(self._own_path, str(error)),)
        if error.param is not None:
            error.param = _PATH.sub(self._own_path, error.param)

    def _own_path(self, match: re.Match[str]) -> str:
        path = match[0]
        owner = _OWNER.match(path)
        if owner is not None:
            message, dot, rest = owner[0].partition(".")
            own = self._places.get(owner[0]) or f"{self._places.get(message, message)}{dot}{rest}"
            path = own + path[owner.end() :]
        for theirs, ours in _OWN_FIELDS.items():
            path = path.replace(theirs, ours)
        return path


def _placed_parts(blocks: Sequence[tuple[str, _Said]]) -> list[Placed]:
    return [(place, part) for place, block in blocks for part in block.parts()]


def _result(place: str, block: ToolResultBlock) -> str | list[Placed]:
    """The content of a tool result: text, or parts if it has others."""
    failed = "Error: " if block.is_error else ""
    if isinstance(block.content, str):
        return failed + block.content
    texts = [shown.text for shown in block.content if isinstance(shown, TextBlock)]
    if len(texts) == len(block.content):
        return failed + "\n".join(texts)
    parts = _placed_parts([(f"{place}.content[{index}]", shown) for index, shown in enumerate(block.content)])
    return [(place, {"type": "text", "text": failed}), *parts] if failed else parts
