"""Follows an answer's reasoning token by token. Imports no torch."""

from __future__ import annotations

from typing import Literal

import msgspec

from vlmserve.types import SamplingParams, Thoughts


class Thinking:
    """Without a start marker, there is no reasoning. budget: maximum tokens between markers."""

    __slots__ = ("_budget", "_stage", "num_tokens", "thoughts")

    def __init__(self, thoughts: Thoughts, budget: int | None = None) -> None:
        self.thoughts = thoughts
        self._budget = budget
        self._stage: Literal["before", "inside", "after"] = "inside" if thoughts.begun else "before"
        self.num_tokens = 0
        """Reasoning tokens so far."""

    @classmethod
    def of(cls, thoughts: Thoughts | None, params: SamplingParams) -> Thinking | None:
        """With a grammar (except for tools), leading space belongs to the answer."""
        if thoughts is None:
            return None
        if params.grammar is not None and params.grammar.source != "tools":
            thoughts = msgspec.structs.replace(thoughts, blank_ids=())
        return cls(thoughts, params.thinking_token_budget)

    @property
    def is_before(self) -> bool:
        return self._stage == "before"

    @property
    def is_inside(self) -> bool:
        return self._stage == "inside"

    @property
    def is_over(self) -> bool:
        return self._stage == "after"

    def takes(self, token_id: int) -> bool:
        """Return whether a token belongs to the reasoning, as its markers do."""
        return self.is_inside or (self.is_before and token_id == self.thoughts.start_id)

    def append(self, token_id: int) -> None:
        if self.is_before:
            if token_id not in self.thoughts.blank_ids:
                self._stage = "inside" if token_id == self.thoughts.start_id else "after"
        elif self.is_inside and token_id == self.thoughts.end_id:
            self._stage = "after"
        elif self.is_inside:
            self.num_tokens += 1

    def may_begin(self, left: int, needed: int) -> bool:
        """left, needed: see `forced`."""
        return self._budget != 0 and not (needed and left <= needed + 2)

    def forced(self, left: int, needed: int) -> int | None:
        """Return the end marker if the reasoning has to end.

        left: tokens left for the answer. needed: tokens of the shortest answer after the marker; 0: any number.
        """
        if not self.is_inside:
            return None
        is_spent = self._budget is not None and self.num_tokens >= self._budget
        return self.thoughts.end_id if is_spent or (needed and left <= needed + 1) else None
