"""Starts concurrent requests a few at a time, so that the event loop also serves others."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

from starlette.requests import ClientDisconnect

from vlmserve.cancellation import client

HAS_LEFT = "vlmserve.has_left"
"""Key in an ASGI scope: a function that returns whether the client has left. Absent if the server does not know."""
_LOOKED_AT = 8
"""Maximum requests to examine for each one that starts; the clients of the others have left."""
PER_ROUND = 4
"""Requests that start in an iteration of the event loop. Each takes some milliseconds."""


class Entrance:
    """Clients in round-robin order. Only bursts wait. Use it from one event loop."""

    def __init__(self, per_round: int = PER_ROUND) -> None:
        self._waiting: OrderedDict[str, deque[Callable[[], bool]]] = OrderedDict()
        self.per_round = per_round
        self._renew()
        self.is_due = False
        """True if the next round is scheduled."""

    def admit(self, name: str, begin: Callable[[], bool]) -> None:
        """Call `begin` in a later iteration of the event loop if this one is full.

        begin: returns False if the client has left.
        """
        self._schedule()
        if self._left and self._looks and not self._waiting:
            self._try(begin)
        else:
            self._waiting.setdefault(name, deque()).append(begin)

    async def enter(self, has_left: Callable[[], bool] = lambda: False) -> None:
        """Wait for a turn. Raises ClientDisconnect if the client has left before it."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def begin() -> bool:
            if turn.cancelled():
                return False
            if has_left():
                turn.set_exception(ClientDisconnect())
                return False
            turn.set_result(None)
            return True

        self.admit(client.get(), begin)
        await turn

    def _schedule(self) -> None:
        if not self.is_due:
            self.is_due = True
            asyncio.get_running_loop().call_soon(self._begin_round)

    def _begin_round(self) -> None:
        self.is_due = False
        self._renew()
        while self._left and self._looks and self._waiting:
            name, turns = next(iter(self._waiting.items()))
            begin = turns.popleft()
            self._waiting.move_to_end(name)
            if not turns:
                del self._waiting[name]
            self._try(begin)
        if self._waiting or self._looks < _LOOKED_AT * self.per_round:
            self._schedule()

    def _renew(self) -> None:
        self._left, self._looks = self.per_round, _LOOKED_AT * self.per_round

    def _try(self, begin: Callable[[], bool]) -> None:
        self._looks -= 1
        self._left -= begin()
