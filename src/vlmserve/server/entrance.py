"""Requests that arrive at once begin a few at a time, so that the event loop answers others in between."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

from vlmserve.cancellation import client

PER_ROUND = 4
"""Requests that begin in one iteration of the event loop. Each takes some milliseconds of it."""


class Entrance:
    """Lets requests in, clients in turn. A request waits only if many arrive at once. For one event loop."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._left = PER_ROUND
        self.is_due = False
        """True if the next round is scheduled."""

    async def enter(self) -> None:
        """Wait until a request of the current client may begin."""
        if self._left and not self._waiting:
            self._left -= 1
            self._schedule()
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client.get(), deque()).append(turn)
        self._schedule()
        await turn

    def _schedule(self) -> None:
        if not self.is_due:
            self.is_due = True
            asyncio.get_running_loop().call_soon(self._begin_round)

    def _begin_round(self) -> None:
        self.is_due, self._left = False, PER_ROUND
        while self._left and self._waiting:
            name, turns = next(iter(self._waiting.items()))
            turn = turns.popleft()
            self._waiting.move_to_end(name)
            if not turns:
                del self._waiting[name]
            if not turn.cancelled():
                turn.set_result(None)
                self._left -= 1
        if self._waiting or self._left < PER_ROUND:
            self._schedule()
