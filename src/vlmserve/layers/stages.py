"""Computing in stages, so that a step of the engine can stop between two of them and a later one can go on."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

Stages: TypeAlias = "Generator[None, None, T]"
"""It yields where the budget is too small to go on; in the end it returns the result."""


class StageBudget:
    """How many multiplications may be made before the next pause, and how many were made.

    A stage is as large as the budget allows. least: multiplications of a stage that does not end its operation: smaller
    ones use the processor badly, so what is left is kept until it is enough. rows: rows of such a stage, or a multiple
    of them. A product reads its whole weight for so many rows at a time, and would read it for fewer as well.
    """

    def __init__(self, left: float = math.inf, *, least: int = 1, rows: int = 1) -> None:
        self.left, self.least, self.rows = left, least, rows
        self.made = 0

    def take(self, units: int, products: int, multiple: int = 1) -> int:
        """How many of the remaining units of an operation are the next stage; 0: the budget is too small for one.

        products: multiplications of a unit. multiple: of how many units a stage consists that does not end it.
        """
        count = units if units * products <= self.left else int(self.left // products) // multiple * multiple
        if count < units and count * products < self.least:
            return 0
        self.left -= count * products
        self.made += count * products
        return count


def run_stages(stages: Stages[T]) -> T:
    """The result of all stages, whose budget has no bound."""
    while True:
        try:
            next(stages)
        except StopIteration as end:
            result: T = end.value
            return result


def by_rows(compute: Callable[..., Tensor], products: int, budget: StageBudget, *inputs: Tensor) -> Stages[Tensor]:
    """What `compute` makes of inputs ``[rows, ...]``, row by row. products: multiplications for each row."""
    parts = yield from in_parts(compute, products, budget, *inputs)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def in_parts(compute: Callable[..., T], products: int, budget: StageBudget, *inputs: Tensor) -> Stages[list[T]]:
    """As `by_rows`, one part for each stage."""
    rows, parts = len(inputs[0]), list[T]()
    done = 0
    while done < rows:
        while not (count := budget.take(rows - done, products, budget.rows)):
            yield
        some = inputs if count == rows else [whole[done : done + count] for whole in inputs]
        parts.append(compute(*some))
        done += count
    return parts
