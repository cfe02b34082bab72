"""The interface of `vlmserve.frontend.requests.RequestPreparer` that the server uses."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol, Unpack

from vlmserve.frontend.conversations import ConversationOptions
from vlmserve.frontend.reasoning import AnswerText, Reasoning
from vlmserve.frontend.tools import ToolForm, ToolUse
from vlmserve.media.cache import ImageCache
from vlmserve.types import Grammar, Prompt, SamplingParams, Thoughts


class Conversation(Protocol):
    """A conversation on its way to a prompt; see `vlmserve.frontend.requests.Conversation`."""

    def render(self) -> None: ...

    def prompt(self) -> Prompt: ...


class Preparer(Protocol):
    """Makes prompts; see `vlmserve.frontend.requests.RequestPreparer`. Called from worker threads."""

    image_cache: ImageCache

    tool_form: ToolForm

    reasoning: Reasoning | None

    @property
    def supports_images(self) -> bool: ...

    @property
    def supports_videos(self) -> bool: ...

    @property
    def takes_tools(self) -> bool: ...

    def tokenizer_info(self) -> dict[str, Any]: ...

    @property
    def template_settings(self) -> Collection[str]: ...

    def conversation(self, messages: Sequence[Any], **options: Unpack[ConversationOptions]) -> Conversation: ...

    def knows_grammar(self, grammar: Grammar) -> bool: ...

    def check_grammar(self, grammar: Grammar, tools: ToolUse | None = None, *, quick: bool = False) -> list[str]: ...

    def text(self, text: str) -> Prompt: ...

    def tokens(self, token_ids: Sequence[int]) -> Prompt: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...

    def token_texts(self, token_ids: Sequence[int]) -> list[str]: ...

    def with_bad_words(self, params: SamplingParams) -> SamplingParams: ...

    def answer_text(
        self, params: SamplingParams, thoughts: Thoughts | None = None, shown_ids: frozenset[int] = frozenset()
    ) -> AnswerText: ...
