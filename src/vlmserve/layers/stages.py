"""Compute in stages, so that a step can pause and a later step resume."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

Stages: TypeAlias = "Generator[None, None, T]"
"""Yields when the budget is too small to continue, and returns the result."""


class StageBudget:
    """MACs left until the next pause, and MACs made.

    least: minimum MACs of a stage that does not end its operation, because smaller ones use the processor badly. rows:
    rows of such a stage are a multiple. A matmul reads its whole weight for each group of rows.
    """

    def __init__(self, left: float = math.inf, *, least: int = 1, rows: int = 1) -> None:
        self.left, self.least, self.rows = left, least, rows
        self.made = 0

    def take(self, units: int, products: int, multiple: int = 1) -> int:
        """Return the units of the next stage; 0: the budget is too small.

        products: MACs of a unit. multiple: divides the units, unless the stage ends the operation.
        """
        count = units if units * products <= self.left else int(self.left // products) // multiple * multiple
        if count < units and count * products < self.least:
            return 0
        self.left -= count * products
        self.made += count * products
        return count


def run_stages(stages: Stages[T]) -> T:
    while True:
        try:
            next(stages)
        except StopIteration as end:
            result: T = end.value
            return result


def by_rows(compute: Callable[..., Tensor], products: int, budget: StageBudget, *inputs: Tensor) -> Stages[Tensor]:
    """Apply `compute` to ``[rows, ...]`` in stages. products: MACs of a row."""
    parts = yield from in_parts(compute, products, budget, *inputs)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def in_parts(compute: Callable[..., T], products: int, budget: StageBudget, *inputs: Tensor) -> Stages[list[T]]:
    rows, parts = len(inputs[0]), list[T]()
    done = 0
    while done < rows:
        while not (count := budget.take(rows - done, products, budget.rows)):
            yield
        some = inputs if count == rows else [whole[done : done + count] for whole in inputs]
        parts.append(compute(*some))
        done += count
    return parts
