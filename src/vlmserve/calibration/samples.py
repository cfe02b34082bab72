"""Prompts with positions to predict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from vlmserve.frontend.requests import RequestPreparer
from vlmserve.types import Prompt


@dataclass(frozen=True)
class Sample:
    """counted: ascending positions of tokens to predict, without the first token and image tokens."""

    prompt: Prompt
    counted: tuple[int, ...]


def of_text(prompt: Prompt) -> Sample:
    return _sample(prompt, [range(len(prompt.token_ids))])


def of_conversation(
    preparer: RequestPreparer, messages: Sequence[Mapping[str, Any]], *, allow_local: bool = False
) -> Sample:
    """Make the answers of a conversation the tokens to predict, as fine-tuning does: up to the token that ends the
    turn.

    messages: in OpenAI's form; a final question gets a generation prompt.

    An answer starts where the tokens differ from the prompt that asks for it. A first message is no answer.
    `allow_local` and errors are as in `RequestPreparer.chat`.
    """
    answered = bool(messages) and messages[-1].get("role") == "assistant"
    if preparer.takes_one_image and answered:
        prompt = preparer.chat(messages[:-1], allow_local=allow_local)
        said = preparer.encode(f" {_text(messages[-1]['content'])}", add_special_tokens=False)
        first = len(prompt.token_ids)
        whole = msgspec.structs.replace(prompt, token_ids=[*prompt.token_ids, *said])
        return _sample(whole, [range(first, first + len(said))])
    whole = preparer.chat(messages, allow_local=allow_local, add_generation_prompt=not answered)
    ends = preparer.tokenizer.end_token_ids
    answers = []
    for number, message in enumerate(messages):
        if number and message.get("role") == "assistant":
            asked = preparer.chat(messages[:number], allow_local=allow_local)
            so_far = preparer.chat(messages[: number + 1], allow_local=allow_local, add_generation_prompt=False)
            first, last = _common(whole, asked), _common(whole, so_far)
            last = last if last > first else len(whole.token_ids)
            end = next((place + 1 for place in range(first, last) if whole.token_ids[place] in ends), last)
            answers.append(range(first, end))
    return _sample(whole, answers)


def _sample(prompt: Prompt, spans: Sequence[range]) -> Sample:
    of_images = {place for span in prompt.images for place in range(span.start, span.end)}
    return Sample(prompt, tuple(place for span in spans for place in span if place and place not in of_images))


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _common(first: Prompt, second: Prompt) -> int:
    pairs = zip(first.token_ids, second.token_ids, strict=False)
    shorter = min(len(first.token_ids), len(second.token_ids))
    return next((place for place, (one, other) in enumerate(pairs) if one != other), shorter)
