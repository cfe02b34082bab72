"""A worker as a gateway knows it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from vlmserve.scaleout.changes import Changes
from vlmserve.scaleout.messages import Hello
from vlmserve.scaleout.upstream import Upstream


@dataclass
class Member:
    """A worker that a gateway listens to. hello: None until it has answered. made: the changes of adapters that it has
    made."""

    url: str
    upstream: Upstream
    listening: asyncio.Task[None] | None = None
    hello: Hello | None = None
    made: Changes = field(default_factory=Changes)
    is_heard: bool = False
