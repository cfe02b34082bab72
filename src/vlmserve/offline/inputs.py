"""Inputs of `LLM` and `AsyncLLM`: prompts, conversations, queries and documents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from vlmserve.errors import InvalidRequestError

if TYPE_CHECKING:
    from vlmserve.frontend.scoring import Side

Message: TypeAlias = Mapping[str, Any]
Conversation: TypeAlias = Sequence[Message]
Conversations: TypeAlias = Conversation | Iterable[Conversation]
TextPrompt: TypeAlias = str | Mapping[str, Any] | Sequence[int]
TextPrompts: TypeAlias = TextPrompt | Iterable[TextPrompt]


def is_conversation(messages: object) -> TypeGuard[Conversation]:
    """False for a list of conversations."""
    return isinstance(messages, Sequence) and len(messages) > 0 and isinstance(messages[0], Mapping)


def sides_of(given: Any) -> list[Side]:
    """List queries or documents: a text, its parts, vLLM's ``{"content": parts}``, or a list of these."""
    if isinstance(given, str | Mapping) or (isinstance(given, Sequence) and given and _is_part(given[0])):
        given = [given]
    sides: list[Side] = []
    for one in given:
        content = one.get("content", one.get("text")) if isinstance(one, Mapping) else one
        are_parts = isinstance(content, Sequence) and all(map(_is_part, content))
        if not content or not (isinstance(content, str) or are_parts):
            raise InvalidRequestError("queries and documents are texts or lists of parts", param="documents")
        sides.append(content)
    return sides


def _is_part(value: object) -> bool:
    return isinstance(value, Mapping) and "type" in value


def has_roles(messages: object) -> TypeGuard[Conversation]:
    """False for a list of prompts."""
    return is_conversation(messages) and "role" in messages[0]


def is_prompt(prompts: object) -> TypeGuard[TextPrompt]:
    """False for a list of prompts."""
    return isinstance(prompts, str | bytes | Mapping) or are_token_ids(prompts)


def are_token_ids(prompt: object) -> TypeGuard[Sequence[int]]:
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str | bytes)
        and len(prompt) > 0
        and all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in prompt)
    )
