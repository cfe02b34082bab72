"""Tasks of a request: an answer, a vector, or the log probabilities of some tokens."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Pooling = Literal["last", "mean", "cls"]
"""The final hidden states of a prompt that become its vector: last token, mean of all tokens, or first token."""


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Tokens that follow the prompt."""

    def reads_from(self, num_tokens: int) -> int | None:
        """The first token of a prompt whose final hidden states are read; None: only the newest token's are."""
        return None


class Embed(msgspec.Struct, frozen=True, tag=True):
    """A vector of the prompt, made of final hidden states."""

    pooling: Pooling = "last"
    normalize: bool = True
    """True: the vector gets length 1."""
    dimensions: int | None = None
    """Leading elements of the vector to keep, before it is normalized; None: all."""

    def reads_from(self, num_tokens: int) -> int:
        return num_tokens - 1 if self.pooling == "last" else 0


class Score(msgspec.Struct, frozen=True, tag=True):
    """Log probabilities of tokens that may follow the prompt, by the model's own logits."""

    token_ids: tuple[int, ...]

    def reads_from(self, num_tokens: int) -> int:
        return num_tokens - 1


class ScoreContinuation(msgspec.Struct, frozen=True, tag=True):
    """Log probabilities of a prompt's own last tokens, each after all tokens before it, by the model's own logits."""

    start: int
    """The first token that is scored: at least 1, and after all images."""

    def reads_from(self, num_tokens: int) -> int:
        return self.start - 1


Task: TypeAlias = Generate | Embed | Score | ScoreContinuation

GENERATE = Generate()


class TaskResult(msgspec.Struct, frozen=True):
    """The values of a task other than `Generate`."""

    data: bytes
    """Little-endian float32: the vector of `Embed`, or one log probability for each token that is scored."""
