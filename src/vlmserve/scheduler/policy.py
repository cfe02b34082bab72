"""The order of requests, preemption, and sharing a step between jobs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, MutableSequence, Sequence

from vlmserve.scheduler.request import Request

MUCH_SHORTER = 8
"""A job is much shorter than another with at most this fraction of its work."""


def enter_last(queue: MutableSequence[Request], request: Request) -> None:
    place = len(queue)
    while place and queue[place - 1].priority > request.priority:
        place -= 1
    queue.insert(place, request)


def enter_first(queue: MutableSequence[Request], request: Request) -> None:
    place = 0
    while place < len(queue) and queue[place].priority < request.priority:
        place += 1
    queue.insert(place, request)


def take_victim(running: list[Request]) -> Request:
    """Remove the last admitted request of the lowest priority."""
    return running.pop()


def gives_way(running: Sequence[Request], waiting: Request) -> bool:
    return bool(running) and waiting.priority < running[-1].priority


def reserved(own: float, others: Iterable[float], budget: float) -> float:
    """Return the budget to leave to much shorter jobs, at most half. own, others: remaining work."""
    return min(budget / 2, sum(work for work in others if work * MUCH_SHORTER <= own))


def reserved_tokens(request: Request, running: list[Request], waiting: Iterable[Request], budget: int) -> int:
    """Prompt tokens to leave to much shorter, later prompts."""
    if request.num_uncomputed <= budget:
        return 0
    later = itertools.chain(running[running.index(request) + 1 :], waiting)
    lengths = [one.num_uncomputed for one in later if one.priority == request.priority and one.num_uncomputed > 1]
    return int(reserved(request.num_uncomputed, lengths, budget))
