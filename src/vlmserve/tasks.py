"""Tasks of a request: answer, embedding, or log probabilities."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

Pooling = Literal["last", "mean", "cls", "all"]
"""Which final hidden states become the embedding: the last token's, the mean, the first token's, or each token's."""


class Generate(msgspec.Struct, frozen=True, tag=True):
    def reads_from(self, num_tokens: int) -> int | None:
        """First token whose final hidden state is read; None: the newest only."""
        return None


class Prefill(msgspec.Struct, frozen=True, tag=True):
    """Cache the prompt's keys and values."""

    def reads_from(self, num_tokens: int) -> int:
        return num_tokens - 1


class Embed(msgspec.Struct, frozen=True, tag=True):
    """Embed the prompt, or each token, from final hidden states."""

    pooling: Pooling = "last"
    normalize: bool = True
    """Scale embeddings to length 1."""
    dimensions: int | None = None
    """Leading elements to keep, before normalization; None: all."""

    def reads_from(self, num_tokens: int) -> int:
        return num_tokens - 1 if self.pooling == "last" else 0

    def shape(self, num_tokens: int) -> tuple[int, ...]:
        return (num_tokens, -1) if self.pooling == "all" else (-1,)

    def num_bytes(self, num_tokens: int, size: int) -> int:
        """size: elements of a complete embedding."""
        vectors = num_tokens if self.pooling == "all" else 1
        return 4 * vectors * (self.dimensions or size)


class Score(msgspec.Struct, frozen=True, tag=True):
    """Log probabilities of continuations, by unmodified logits.

    The prompt is computed once, if possible with the first long continuation; the others branch from it.
    """

    continuations: tuple[tuple[int, ...], ...]
    """Tokens of each; never empty."""

    @property
    def branches(self) -> list[int]:
        """Continuations of several tokens, by index."""
        return [place for place, tokens in enumerate(self.continuations) if len(tokens) > 1]

    @property
    def first_branch(self) -> tuple[int, ...]:
        return next((tokens for tokens in self.continuations if len(tokens) > 1), ())

    @property
    def longest(self) -> int:
        return max(map(len, self.continuations))

    def reads_from(self, num_tokens: int) -> int:
        return num_tokens - 1


class ScoreBranch(msgspec.Struct, frozen=True, tag=True):
    """Part of a `Score`: a sequence's last tokens and one more."""

    start: int
    """First scored token."""
    last: int
    """The token after the sequence, which is not computed."""

    def reads_from(self, num_tokens: int) -> int:
        return self.start - 1


Task: TypeAlias = Generate | Prefill | Embed | Score | ScoreBranch

GENERATE = Generate()


class TaskResult(msgspec.Struct, frozen=True):
    data: bytes
    """Little-endian float32: concatenated embeddings, or a log probability for each continuation."""

    @classmethod
    def of(cls, values: Sequence[float]) -> TaskResult:
        return cls(struct.pack(f"<{len(values)}f", *values))

    def values(self) -> tuple[float, ...]:
        return struct.unpack(f"<{len(self.data) // 4}f", self.data)
