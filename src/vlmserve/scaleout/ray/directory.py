"""Who belongs to a cluster: an actor that workers and gateways tell that they are there.

A member that has not said so for `MEMORY` seconds is gone. The actor keeps nothing that members do not say again, and
may be started again.
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
"""Seconds between two words of a member."""
MEMORY = 5.0
_START = 600.0
"""Seconds for which a name is kept for a member that has not said yet that it is there."""
_WAIT = 1.0
"""Seconds after which a gateway that waits for a change is answered without one."""
_NAME = "directory"

Kind = Literal["worker", "gateway"]


class Directory:
    """The actor. All times are those of its own clock."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._members: dict[str, tuple[Kind, str, float]] = {}
        self._names: dict[str, tuple[str, float]] = {}
        """Of members by their ids, and until when these have them."""
        self._changed = asyncio.Condition()

    async def token(self) -> str:
        """What the members of the cluster know each other by."""
        return self._token

    async def name(self, id: str, prefix: str) -> str:
        """A name for a member that is about to start: `prefix` and the lowest number that no other member has."""
        now = time.monotonic()
        self._names = {one: (name, until) for one, (name, until) in self._names.items() if until >= now}
        taken = {name for name, _ in self._names.values()}
        name = next(name for number in itertools.count() if (name := f"{prefix}-{number}") not in taken)
        self._names[id] = name, now + _START
        return name

    async def beat(self, id: str, kind: Kind, url: str, name: str) -> None:
        """A member is there. name: empty for one that needs none."""
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
        """The same, as soon as it is not what is known; at the latest after a second."""
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
    """The cluster's directory, which the first who asks makes."""
    # Ray's head would keep what it knows of the latest 100,000 calls, and members make some each second.
    settings = {"max_restarts": -1, "max_task_retries": -1, "max_concurrency": 10_000, "enable_task_events": False}
    actor = ray.remote(num_cpus=0, **settings)(Directory)
    options = {"name": _NAME, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
    return actor.options(**options).remote(secrets.token_hex(16))
