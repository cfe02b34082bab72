"""Data that a gateway sends with a request: owner, tenant, and the generation that it wants to watch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import Scope

from vlmserve.server.generation import Generation

_KEY = "vlmserve.hop"


@dataclass(frozen=True)
class Hop:
    seed: int
    """For requests without a seed, so that another worker can repeat the answer."""
    tag: str
    """Prefix of the ids of stored responses."""
    begun: Callable[[Generation], None]
    """Called with the request's generation when it starts."""


def set_hop(scope: Scope, hop: Hop) -> None:
    scope[_KEY] = hop


def hop_of(scope: Scope) -> Hop | None:
    hop: Hop | None = scope.get(_KEY)
    return hop
