"""Members of a cluster: workers and gateways report to a Ray actor.

A member is gone after `MEMORY` silent seconds. Members repeat all that the actor knows, so it may be restarted.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from typing import Any, Literal

import ray

NAMESPACE = "vlmserve"
BEAT = 0.5
"""Seconds between two reports of a member."""
MEMORY = 5.0
_START = 600.0
"""Seconds that a name is reserved for a starting member."""
_WAIT = 1.0
"""Maximum seconds that `next_urls` waits for a change."""
_NAME = "directory"

Kind = Literal["worker", "gateway"]


class Directory:
    """All times are by the actor's own clock."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._members: dict[str, tuple[Kind, str, float]] = {}
        self._names: dict[str, tuple[str, float]] = {}
        """Name and end of its reservation, by member id."""
        self._changed = asyncio.Condition()

    async def token(self) -> str:
        return self._token

    async def name(self, id: str, prefix: str) -> str:
        """Reserve `prefix` and the lowest free number."""
        now = time.monotonic()
        self._names = {one: (name, until) for one, (name, until) in self._names.items() if until >= now}
        taken = {name for name, _ in self._names.values()}
        name = next(name for number in itertools.count() if (name := f"{prefix}-{number}") not in taken)
        self._names[id] = name, now + _START
        return name

    async def beat(self, id: str, kind: Kind, url: str, name: str) -> None:
        """name: empty if the member has none."""
        is_new = id not in self._members
        if name:
            self._names[id] = name, time.monotonic() + MEMORY
        self._members[id] = kind, url, time.monotonic()
        if is_new:
            await self._tell()

    async def leave(self, id: str) -> None:
        self._names.pop(id, None)
        if self._members.pop(id, None) is not None:
            await self._tell()

    async def urls(self, kind: Kind) -> list[str]:
        oldest = time.monotonic() - MEMORY
        self._members = {id: member for id, member in self._members.items() if member[2] >= oldest}
        return sorted(url for own, url, _ in self._members.values() if own == kind)

    async def next_urls(self, kind: Kind, known: list[str]) -> list[str]:
        """Wait one second at most until the URLs differ from `known`."""
        deadline = time.monotonic() + _WAIT
        while (urls := await self.urls(kind)) == known and (left := deadline - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left), self._changed:
                    await self._changed.wait()
            except TimeoutError:
                break
        return urls

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def open_directory() -> Any:
    """The first call creates it."""
    # Without events: members make some calls each second, and Ray's head remembers the latest 100,000.
    settings = {"max_restarts": -1, "max_task_retries": -1, "max_concurrency": 10_000, "enable_task_events": False}
    actor = ray.remote(num_cpus=0, **settings)(Directory)
    options = {"name": _NAME, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
    return actor.options(**options).remote(secrets.token_hex(16))
