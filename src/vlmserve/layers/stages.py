"""Computing in stages, so that a step of the engine can stop between two of them and a later one can go on."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

Stages: TypeAlias = "Generator[int, None, T]"
"""Before each stage it yields how many multiplications the stage takes; in the end it returns the result."""


def run_stages(stages: Stages[T]) -> T:
    """The result of all stages."""
    while True:
        try:
            next(stages)
        except StopIteration as end:
            result: T = end.value
            return result


def by_rows(compute: Callable[..., Tensor], products: int, limit: float, *inputs: Tensor) -> Stages[Tensor]:
    """What `compute` makes of inputs ``[rows, ...]``, row by row.

    products: multiplications for each row. limit: of a stage; a stage has at least one row.
    """
    rows = len(inputs[0])
    most = max(1, int(min(rows, limit / max(1, products))))
    if most >= rows:
        yield rows * products
        return compute(*inputs)
    # Stages of about the same size.
    size = math.ceil(rows / math.ceil(rows / most))
    parts = []
    for chunks in zip(*(torch.split(whole, size) for whole in inputs), strict=True):
        yield len(chunks[0]) * products
        parts.append(compute(*chunks))
    return torch.cat(parts)
