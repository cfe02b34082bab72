"""A worker, from a gateway's side."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from vlmserve.scaleout.changes import Changes
from vlmserve.scaleout.messages import Hello
from vlmserve.scaleout.upstream import Upstream


@dataclass
class Member:
    url: str
    upstream: Upstream
    listening: asyncio.Task[None] | None = None
    hello: Hello | None = None
    """None until it has answered."""
    made: Changes = field(default_factory=Changes)
    """Changes of adapters that the worker has made."""
    is_heard: bool = False
