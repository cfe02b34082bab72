"""What a gateway says of a request that it sends on, and what it wants to know of its answer.

A server behind a gateway has no keys of its own: who asks, and whose cache a request may use, is what the gateway says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import Scope

from vlmserve.server.generation import Generation

_KEY = "vlmserve.hop"


@dataclass(frozen=True)
class Hop:
    """seed: of a request that says none, so that it can be sent to another worker and have the same answer. tag: what
    the ids of stored responses begin with. begun: called with the request's generation as soon as there is one."""

    seed: int
    tag: str
    begun: Callable[[Generation], None]


def set_hop(scope: Scope, hop: Hop) -> None:
    """Note what a gateway says of a request."""
    scope[_KEY] = hop


def hop_of(scope: Scope) -> Hop | None:
    """What a gateway says of a request; None for one that comes from a client."""
    hop: Hop | None = scope.get(_KEY)
    return hop
