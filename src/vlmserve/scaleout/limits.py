"""Rate limits of API keys that several gateways have together, by way of the cluster's database.

A gateway decides by its own count. What it has admitted it writes down right afterwards, for all keys at once and at
most once in `_PAUSE`, and gets back what all gateways together have used up. A request waits for the database only if
its key was not used here for `_FRESH` seconds, and never for longer than `_PATIENCE`. While the database does not
answer, every gateway goes on by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from vlmserve.config import ServerConfig
from vlmserve.errors import OverloadedError, StorageError
from vlmserve.scaleout.storage import is_shared
from vlmserve.server.accounts import Account
from vlmserve.storage.limits import Taken
from vlmserve.storage.store import Store, open_store

logger = logging.getLogger(__name__)

_FRESH = 1.0
"""Seconds for which a gateway believes what it has heard of a key."""
_PATIENCE = 0.25
"""Seconds for which a request waits to hear of its key."""
_PAUSE = 0.05
"""Seconds between two transactions of a gateway."""
_RETRY = 1.0
"""The same while the database does not answer."""


class ClusterLimits:
    """A `SharedLimits`. To be used from one thread, in an event loop; it takes the store with it when it closes."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._heard: dict[str, float] = {}
        """When it was heard of accounts, by their owners."""
        self._wanted: dict[str, Account] = {}
        """Accounts that the next transaction is about."""
        self._news, self._hurry = asyncio.Event(), asyncio.Event()
        self._asked: asyncio.Future[None] | None = None
        """Done when the next transaction is."""
        self._is_away = False
        self._telling: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, config: ServerConfig) -> ClusterLimits | None:
        """Those of the settings; None if there is no database that several gateways reach. Raises
        ConfigurationError for one that cannot be opened."""
        store = open_store(config) if is_shared(config) else None
        return None if store is None else cls(store)

    async def refresh(self, account: Account) -> None:
        """See `SharedLimits.refresh`."""
        if not account.buckets:
            return
        account.on_use = self._want
        heard = self._heard.get(account.owner)
        if self._is_away or (heard is not None and self._clock() - heard < _FRESH):
            return
        self._want(account)
        if self._asked is None:
            self._asked = asyncio.get_running_loop().create_future()
        self._hurry.set()
        heard_now, _ = await asyncio.wait((self._asked,), timeout=_PATIENCE)
        if not heard_now:
            self._be_alone("it is slow")

    async def tell(self) -> None:
        """Write down what was taken, and hear what others took. Raises StorageError or OverloadedError."""
        accounts, self._wanted = self._wanted, {}
        asked, self._asked = self._asked, None
        buckets = {f"{owner} {kind}": bucket for owner, one in accounts.items() for kind, bucket in one.buckets.items()}
        taken = [Taken(name, bucket.per_minute, bucket.tell()) for name, bucket in buckets.items()]
        try:
            used = await self._store.run(self._store.limits.take, taken)
        except (StorageError, OverloadedError):
            self._wanted = accounts | self._wanted
            for name, _, amount in taken:
                buckets[name].taken += amount
            raise
        finally:
            if asked is not None:
                asked.set_result(None)
        for name, bucket in buckets.items():
            bucket.hear(used[name])
        self._heard |= dict.fromkeys(accounts, self._clock())

    async def close(self) -> None:
        """Write down what was taken last, and close the store."""
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)
        with contextlib.suppress(StorageError, OverloadedError):
            await self.tell()
        await asyncio.to_thread(self._store.close)

    def _want(self, account: Account) -> None:
        self._wanted[account.owner] = account
        self._news.set()
        if self._telling is None:
            self._telling = asyncio.ensure_future(self._tell_always())

    async def _tell_always(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            self._hurry.clear()
            try:
                await self.tell()
            except (StorageError, OverloadedError) as error:
                self._be_alone(str(error))
                self._news.set()
                await asyncio.sleep(_RETRY)
            else:
                if self._is_away:
                    logger.info("The database of rate limits answers again")
                self._is_away = False
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_PAUSE):
                        await self._hurry.wait()

    def _be_alone(self, reason: str) -> None:
        if not self._is_away:
            logger.warning("The database of rate limits does not answer; each gateway counts by itself: %s", reason)
        self._is_away = True
