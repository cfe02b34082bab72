"""Results of `LLM`, with vLLM's names."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vlmserve.types import FinishReason, Grammar, ImageSize, TokenLogprobs

_SHOWN_CHARACTERS = 200
"""Characters of a text that a repr shows."""


@dataclass(frozen=True)
class Logprob:
    """A token's log probability. rank: 1 for the most likely token. decoded_token: its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One answer."""

    index: int
    text: str
    token_ids: list[int]
    """Without the end token that finished it; includes the reasoning's tokens."""
    finish_reason: FinishReason
    """"stop", "length" (the token limit), or "error"."""
    stop_reason: int | str | None = None
    """The stop string, or token of `stop_token_ids`, that ended it; None otherwise, also for the model's end token."""
    error: str | None = None
    """The reason of finish_reason "error"."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each of `token_ids`, if requested: by token id, the token first, then the most likely ones in order."""
    grammar: Grammar | None = None
    """The format that it follows."""
    reasoning_content: str | None = None
    """The reasoning before `text`, if the model separates it."""

    def __repr__(self) -> str:
        shown = {"text": _short(self.text), "finish_reason": self.finish_reason, "tokens": len(self.token_ids)}
        shown |= {name: value for name in ("stop_reason", "error") if (value := getattr(self, name)) is not None}
        return f"CompletionOutput({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def cumulative_logprob(self) -> float | None:
        """The log probability of all tokens together."""
        if self.logprobs is None:
            return None
        return sum(by_id[token_id].logprob for token_id, by_id in zip(self.token_ids, self.logprobs, strict=True))

    @property
    def parsed(self) -> Any:
        """The value of an answer with a JSON format, or an instance of the format's pydantic model.

        None without such a format, or if the answer did not end by itself (see `finish_reason`). Raises pydantic's
        ValidationError if the model's validators reject the answer.
        """
        if self.grammar is None or not self.grammar.is_json or self.finish_reason != "stop":
            return None
        try:
            value = json.loads(self.text)
        except ValueError:  # a stop string cut it
            return None
        return value if self.grammar.model is None else self.grammar.model.model_validate_json(self.text)


@dataclass(frozen=True)
class RequestOutput:
    """The result of one prompt."""

    request_id: str
    prompt: str
    """Its text, with one placeholder for each image; of a conversation, the rendered chat template."""
    prompt_token_ids: list[int]
    """With one token for each image embedding."""
    outputs: list[CompletionOutput]
    """The answers, `SamplingParams.n` of them."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    num_images_encoded: int = 0
    """Images that went through the vision tower for it."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each of `prompt_token_ids`, if requested; None for the first token and for images."""
    finished: bool = True
    image_sizes: list[ImageSize] = field(default_factory=list)
    """What the model saw of each image, in order."""

    def __repr__(self) -> str:
        return (
            f"RequestOutput(request_id={self.request_id!r}, prompt={_short(self.prompt)!r}, "
            f"prompt_tokens={len(self.prompt_token_ids)}, outputs={self.outputs!r})"
        )

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.outputs[0].text

    @property
    def parsed(self) -> Any:
        """`CompletionOutput.parsed` of the first answer."""
        return self.outputs[0].parsed


@dataclass(frozen=True)
class PoolingOutput:
    """An embedding, or one for each token."""

    data: npt.NDArray[np.float32]
    """``[dimensions]`` or ``[tokens, dimensions]``; empty after an error."""
    error: str | None = None
    """The reason, if it failed."""

    @property
    def embedding(self) -> list[Any]:
        """The embedding as a list of floats, or of such lists."""
        values: list[Any] = self.data.tolist()
        return values

    def __repr__(self) -> str:
        return f"PoolingOutput(shape={self.data.shape}{'' if self.error is None else f', error={self.error!r}'})"


@dataclass(frozen=True)
class PoolingRequestOutput:
    """The embedding of one prompt. Other fields: as in `RequestOutput`."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int] = field(repr=False)
    num_cached_tokens: int = 0
    num_images_encoded: int = 0
    finished: bool = True


@dataclass(frozen=True)
class ScoringOutput:
    """A document's score: a probability, a cosine, or a sum of token cosines."""

    score: float


@dataclass(frozen=True)
class ScoringRequestOutput:
    """The score of one query and one document."""

    outputs: ScoringOutput
    finished: bool = True


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def logprobs_by_id(logprobs: TokenLogprobs, token_bytes: Callable[[int], bytes]) -> dict[int, Logprob]:
    """A token and its alternatives by id, the token first."""
    others = [(token_id, score, rank) for rank, (token_id, score) in enumerate(logprobs.top, start=1)]
    return {
        token_id: Logprob(score, rank, token_bytes(token_id).decode(errors="replace"))
        for token_id, score, rank in [(logprobs.token_id, logprobs.logprob, logprobs.rank), *others]
    }
