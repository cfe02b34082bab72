"""A queue that shares slow work fairly among clients."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from vlmserve.cancellation import Result, client, run_in_thread


class FairQueue:
    """Limits concurrent work in total and per client. Use it from one event loop.

    The client with the least running work is next, on ties round-robin.
    """

    def __init__(self, capacity: int, per_client: int) -> None:
        self._capacity = capacity
        self._per_client = per_client
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def running(self) -> int:
        return self._running.total()

    @property
    def is_free(self) -> bool:
        return self.running < self._capacity and self._running[client.get()] < self._per_client

    async def acquire(self) -> str:
        """Wait until work of the client may run. Returns its name for `release`."""
        name = client.get()
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, deque()).append(granted)
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._forget(name, granted)
                self._grant()
            else:
                self.release(name)
            raise
        return name

    def release(self, name: str) -> None:
        self._running[name] -= 1
        self._running += Counter()  # drops clients without work
        self._grant()

    def _grant(self) -> None:
        while self._running.total() < self._capacity:
            name = min(self._waiting, key=lambda name: self._running[name], default=None)
            if name is None or self._running[name] >= self._per_client:
                return
            granted = self._waiting[name][0]
            self._waiting.move_to_end(name)
            self._forget(name, granted)
            if not granted.cancelled():
                granted.set_result(None)
                self._running[name] += 1

    def _forget(self, name: str, granted: asyncio.Future[None]) -> None:
        queue = self._waiting.get(name)
        if queue is not None and granted in queue:
            queue.remove(granted)
            if not queue:
                del self._waiting[name]


class FairThreads(FairQueue):
    """Threads that clients share fairly."""

    def __init__(self, name: str, capacity: int, per_client: int) -> None:
        super().__init__(capacity, per_client)
        self.executor = ThreadPoolExecutor(capacity, name)

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run `work` in a thread (see `run_in_thread`). After a caller leaves, it still counts until its end."""
        name = await self.acquire()
        return await run_in_thread(self.executor, work, partial(self.release, name))
