"""Tasks of a request: an answer, a vector, or the log probabilities of some tokens."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Pooling = Literal["last", "mean", "cls", "all"]
"""The final hidden states of a prompt that become its vector: last token, mean of all tokens, first token, or all of
them, each as a vector of its own."""


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Tokens that follow the prompt."""

    def reads_from(self, num_tokens: int) -> int | None:
        """The first token of a prompt whose final hidden states are read; None: only the newest token's are."""
        return None


class Prefill(msgspec.Struct, frozen=True, tag=True):
    """Keys and values of the prompt, for requests that find them cached. The result is empty."""

    def reads_from(self, num_tokens: int) -> int:
        return num_tokens - 1


class Embed(msgspec.Struct, frozen=True, tag=True):
    """A vector of the prompt or of each token, made of final hidden states."""

    pooling: Pooling = "last"
    normalize: bool = True
    """True: vectors get length 1."""
    dimensions: int | None = None
    """Leading elements of vectors to keep, before they are normalized; None: all."""

    def reads_from(self, num_tokens: int) -> int:
        return num_tokens - 1 if self.pooling == "last" else 0

    def shape(self, num_tokens: int) -> tuple[int, ...]:
        """The shape of the result for a prompt of that many tokens, for `reshape`."""
        return (num_tokens, -1) if self.pooling == "all" else (-1,)

    def num_bytes(self, num_tokens: int, size: int) -> int:
        """Memory of the result for a prompt of that many tokens. size: elements of a whole vector."""
        vectors = num_tokens if self.pooling == "all" else 1
        return 4 * vectors * (self.dimensions or size)


class Score(msgspec.Struct, frozen=True, tag=True):
    """Log probabilities of continuations of the prompt, by the model's own logits.

    The prompt is computed once. All continuations of more than one token then branch from it in one batch.
    """

    continuations: tuple[tuple[int, ...], ...]
    """Tokens of each, at least one."""

    @property
    def branches(self) -> list[int]:
        """Places of the continuations of more than one token."""
        return [place for place, tokens in enumerate(self.continuations) if len(tokens) > 1]

    @property
    def longest(self) -> int:
        """Tokens of the longest continuation."""
        return max(map(len, self.continuations))

    def reads_from(self, num_tokens: int) -> int:
        return num_tokens - 1


class ScoreBranch(msgspec.Struct, frozen=True, tag=True):
    """The log probability of a sequence's last tokens and of one more token. The scheduler makes it of a `Score`."""

    start: int
    """The first token that is scored."""
    last: int
    """The token after the sequence, which need not be computed."""

    def reads_from(self, num_tokens: int) -> int:
        return self.start - 1


Task: TypeAlias = Generate | Prefill | Embed | Score | ScoreBranch

GENERATE = Generate()


class TaskResult(msgspec.Struct, frozen=True):
    """The values of a task other than `Generate`."""

    data: bytes
    """Little-endian float32: the vectors of `Embed` one after another, or a log probability for each continuation."""
