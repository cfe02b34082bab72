"""What `LLM` returns, under the names that vLLM has for it."""

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
    """How likely a token was. rank: 1 for the likeliest one. decoded_token: its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One answer. token_ids: without the end token that finished it. error: what went wrong, if something did.

    finish_reason: "stop", "length" (the limit of tokens), or "error". stop_reason: the stop string, or the token of
    `stop_token_ids`, that ended it; None for anything else, the model's own end token included.
    logprobs: for each of `token_ids`, if they were asked for: that token first, then the likeliest ones in order, by
    their ids. grammar: what the answer was held to. reasoning_content: what the model thought before `text`, where
    thoughts are told from answers and there are some; `token_ids` has its tokens, too.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    error: str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    grammar: Grammar | None = None
    reasoning_content: str | None = None

    def __repr__(self) -> str:
        """The fields that people look at; others are attributes."""
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
        """The value of an answer that was held to JSON, or an instance of the pydantic model that it was held to.

        None if it was not held to JSON, or did not end by itself (see `finish_reason`). Raises pydantic's
        ValidationError where validators of the model refuse what its schema allows.
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
    """What came of one prompt.

    prompt: its text, with one placeholder for each image; of a conversation, what the chat template made of it.
    prompt_token_ids: with the placeholders of images expanded. outputs: the answers, as many as `SamplingParams.n`.
    num_cached_tokens: tokens of the prompt that were found in the prefix cache. num_images_encoded: images that went
    through the vision tower for it. prompt_logprobs: for each of `prompt_token_ids`, if they were asked for; None for
    the first one and for those of images. image_sizes: what the model saw of the prompt's images, in order.
    """

    request_id: str
    prompt: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    num_images_encoded: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = True
    image_sizes: list[ImageSize] = field(default_factory=list)

    def __repr__(self) -> str:
        """The answers and the beginning of the prompt; other fields are attributes."""
        return (
            f"RequestOutput(request_id={self.request_id!r}, prompt={_short(self.prompt)!r}, "
            f"prompt_tokens={len(self.prompt_token_ids)}, outputs={self.outputs!r})"
        )

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.outputs[0].text

    @property
    def parsed(self) -> Any:
        """`CompletionOutput.parsed` of the first answer."""
        return self.outputs[0].parsed


@dataclass(frozen=True)
class PoolingOutput:
    """A vector, or one for each token."""

    data: npt.NDArray[np.float32]
    """``[dimensions]`` or ``[tokens, dimensions]``; empty if there is an error."""
    error: str | None = None
    """The reason, if it failed."""

    @property
    def embedding(self) -> list[Any]:
        """The vector as a list of floats, or a list of such lists."""
        values: list[Any] = self.data.tolist()
        return values

    def __repr__(self) -> str:
        """The size and the error."""
        return f"PoolingOutput(shape={self.data.shape}{'' if self.error is None else f', error={self.error!r}'})"


@dataclass(frozen=True)
class PoolingRequestOutput:
    """The vector of one prompt.

    prompt_token_ids, num_cached_tokens, num_images_encoded: as in `RequestOutput`.
    """

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int] = field(repr=False)
    num_cached_tokens: int = 0
    num_images_encoded: int = 0
    finished: bool = True


@dataclass(frozen=True)
class ScoringOutput:
    """The score of a document: a probability, a cosine of vectors, or the sum of the cosines of tokens."""

    score: float


@dataclass(frozen=True)
class ScoringRequestOutput:
    """The score of one query and one document."""

    outputs: ScoringOutput
    finished: bool = True


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def logprobs_by_id(logprobs: TokenLogprobs, token_bytes: Callable[[int], bytes]) -> dict[int, Logprob]:
    """A token and its alternatives by token ids, the token itself first. token_bytes: the bytes of a token id."""
    others = [(token_id, score, rank) for rank, (token_id, score) in enumerate(logprobs.top, start=1)]
    return {
        token_id: Logprob(score, rank, token_bytes(token_id).decode(errors="replace"))
        for token_id, score, rank in [(logprobs.token_id, logprobs.logprob, logprobs.rank), *others]
    }
