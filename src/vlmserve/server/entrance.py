"""Requests that arrive at once begin a few at a time, so that the event loop answers others in between."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

from vlmserve.cancellation import client

PER_ROUND = 4
"""Requests that the guard lets in per iteration of the event loop. Each takes some milliseconds of it."""


class Entrance:
    """Lets requests in, clients in turn. A request waits only if many arrive at once. For one event loop."""

    def __init__(self, per_round: int = PER_ROUND) -> None:
        self._waiting: OrderedDict[str, deque[Callable[[], bool]]] = OrderedDict()
        self.per_round = self._left = per_round
        self.is_due = False
        """True if the next round is scheduled."""

    def admit(self, name: str, begin: Callable[[], bool]) -> None:
        """Call `begin` for a request of client `name`, in a later iteration of the event loop if this one is full.

        begin: returns False if the request needs no turn, because its client has left.
        """
        self._schedule()
        if self._left and not self._waiting:
            self._left -= begin()
        else:
            self._waiting.setdefault(name, deque()).append(begin)

    async def enter(self) -> None:
        """Wait until a request of the current client may begin."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def begin() -> bool:
            if turn.cancelled():
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
        self.is_due, self._left = False, self.per_round
        while self._left and self._waiting:
            name, turns = next(iter(self._waiting.items()))
            begin = turns.popleft()
            self._waiting.move_to_end(name)
            if not turns:
                del self._waiting[name]
            self._left -= begin()
        if self._waiting or self._left < self.per_round:
            self._schedule()
