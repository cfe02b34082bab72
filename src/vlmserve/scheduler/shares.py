"""How a long job shares a step with shorter ones that came later."""

from __future__ import annotations

from collections.abc import Iterable

MUCH_SHORTER = 8
"""A job is much shorter than another if it has at most this fraction of its work."""


def reserved(own: float, others: Iterable[float], budget: float) -> float:
    """The part of a budget that a job leaves to much shorter ones, which delay it only a little: at most half.

    own, others: work that each job lacks. Jobs of similar length leave each other nothing: they end in order.
    """
    return min(budget / 2, sum(work for work in others if work * MUCH_SHORTER <= own))
