"""Compute a task's result from one request's final hidden states."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from vlmserve.tasks import Task


class Head(ABC):
    """Collects a task's input while the chunks of a prompt are computed."""

    def __init__(self, task: Task, num_tokens: int) -> None:
        """num_tokens: of the prompt."""
        self.num_tokens = num_tokens
        self._next = task.reads_from(num_tokens) or 0

    def places(self, start: int, end: int) -> range:
        """The tokens of ``start <= i < end`` that the head reads. Recomputed tokens are read once."""
        return range(min(end, max(start, self._next)), end)

    def take(self, rows: Tensor, count: int) -> None:
        """Read states ``[count, hidden_size]`` of the next tokens, or what `TokenHead` reads of them."""
        self._next += count
        self._add(rows.float())

    @abstractmethod
    def _add(self, rows: Tensor) -> None: ...

    @abstractmethod
    def result(self) -> Tensor:
        """Return the float32 values of `TaskResult` after the whole prompt."""
