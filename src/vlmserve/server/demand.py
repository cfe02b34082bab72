"""Users of a model that is loaded on demand, and requests that wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator


class Demand:
    """Use from one event loop. is_lazy: the first request loads the model."""

    def __init__(self, *, is_lazy: bool) -> None:
        self.loads_model = is_lazy
        """True if a request loads the model when it is absent."""
        self.wanted = asyncio.Event()
        """Set when the model is to be loaded."""
        if not is_lazy:
            self.wanted.set()
        self.failure = ""
        """Why the latest load failed."""
        self._settled = asyncio.Event()
        """Set when the load has succeeded or failed."""
        self._num_users = 0
        self._last_use = time.monotonic()

    @property
    def idle_seconds(self) -> float:
        """Seconds since the model was last used or loaded."""
        return 0.0 if self._num_users else time.monotonic() - self._last_use

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        self._num_users += 1
        try:
            yield
        finally:
            self._num_users -= 1
            self._last_use = time.monotonic()

    async def load(self) -> None:
        """Wait until the model is loaded or `failure` says why not."""
        self.wanted.set()
        await self._settled.wait()

    def loaded(self) -> None:
        self._last_use = time.monotonic()
        self._settled.set()

    def failed(self, reason: str) -> None:
        """End the wait of requests; a later request asks for the model again."""
        self.failure = reason
        self._settled.set()
        self.unloaded()

    def unloaded(self) -> None:
        self.loads_model = True
        self.wanted.clear()
        self._settled = asyncio.Event()
