"""Queues in which requests of higher priority come first, and those of the same in order of arrival."""

from __future__ import annotations

from collections.abc import MutableSequence

from vlmserve.scheduler.request import Request


def enter_last(queue: MutableSequence[Request], request: Request) -> None:
    """Put a request behind all others of its priority."""
    place = len(queue)
    while place and queue[place - 1].priority > request.priority:
        place -= 1
    queue.insert(place, request)


def enter_first(queue: MutableSequence[Request], request: Request) -> None:
    """Put a request before all others of its priority."""
    place = 0
    while place < len(queue) and queue[place].priority < request.priority:
        place += 1
    queue.insert(place, request)
