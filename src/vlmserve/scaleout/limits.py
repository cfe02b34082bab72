"""Limits of API keys that several gateways have together, by way of the cluster's database.

A gateway decides by its own count. What it has admitted it writes down right afterwards, for all keys at once and at
most once in `_PAUSE`, and gets back what all gateways together have used up. A request waits for the database only if
its key was not used here for `_FRESH` seconds, and never for longer than `PATIENCE`. While the database does not
answer, every gateway goes on by itself.

Of the requests that a key may run at once, each gateway has places in the database, which it asks for when a request
comes that has none, and gives back when requests end. It has them for `_LEASE` seconds and renews them, so that those
of a gateway that is gone come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable

from vlmserve.config import ServerConfig
from vlmserve.errors import OverloadedError, StorageError
from vlmserve.scaleout.storage import is_shared
from vlmserve.server.accounts import Account
from vlmserve.storage.limits import Places, Taken
from vlmserve.storage.store import Store, open_store

logger = logging.getLogger(__name__)

_FRESH = 1.0
"""Seconds for which a gateway believes what it has heard of a key."""
PATIENCE = 0.25
"""Seconds for which a request waits to hear of its key."""
_PAUSE = 0.05
"""Seconds between two transactions of a gateway."""
RETRY = 1.0
"""The same while the database does not answer."""
_LEASE = 15.0
"""Seconds for which a gateway has places for running requests."""
_RENEWAL = 5.0
"""Seconds after which it renews them."""


class ClusterLimits:
    """A `SharedLimits`. To be used from one thread, in an event loop; it takes the store with it when it closes."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._server = secrets.token_hex(8)
        self._waiting: Counter[str] = Counter()
        """Requests that wait for a place, by the owners of their accounts."""
        self._holding: dict[str, Account] = {}
        """Accounts that have places."""
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
        is_limited = account.key.max_concurrency is not None
        if not account.buckets and not is_limited:
            return
        account.on_use = self._want
        if self._is_away:
            account.places = None
            return
        if is_limited and account.places is None:
            account.places = 0
        if self._is_fresh(account) and not self._lacks_place(account):
            return
        self._waiting[account.owner] += is_limited
        try:
            self._want(account)
            if self._asked is None:
                self._asked = asyncio.get_running_loop().create_future()
            self._hurry.set()
            heard_now, _ = await asyncio.wait((self._asked,), timeout=PATIENCE)
        finally:
            self._waiting[account.owner] -= is_limited
            if not self._waiting[account.owner]:
                del self._waiting[account.owner]
        if not heard_now:
            self._be_alone("it is slow")
            account.places = None
        elif is_limited:
            self._want(account)  # should the request not run after all, it gives its place back

    def _is_fresh(self, account: Account) -> bool:
        heard = self._heard.get(account.owner)
        return not account.buckets or (heard is not None and self._clock() - heard < _FRESH)

    def _lacks_place(self, account: Account) -> bool:
        """Whether others may have left a place for one more request, which this gateway does not have yet."""
        most = account.key.max_concurrency
        wanted = account.num_running + self._waiting[account.owner] + 1
        return most is not None and (account.places or 0) < wanted <= most

    async def tell(self) -> None:
        """Write down what was taken, and hear what others took. Raises StorageError or OverloadedError.

        What was begun is finished even if the caller is cancelled.
        """
        telling = asyncio.ensure_future(self._tell())
        try:
            await asyncio.shield(telling)
        except asyncio.CancelledError:
            await asyncio.wait((telling,))
            telling.exception()  # then what it was about is told the next time
            raise

    async def _tell(self) -> None:
        accounts, self._wanted = {**self._holding, **self._wanted}, {}
        asked, self._asked = self._asked, None
        buckets = {f"{owner} {kind}": bucket for owner, one in accounts.items() for kind, bucket in one.buckets.items()}
        taken = [Taken(name, bucket.per_minute, bucket.tell()) for name, bucket in buckets.items()]
        places = [self._places(account) for account in accounts.values() if account.key.max_concurrency is not None]

        def write() -> tuple[dict[str, int], dict[str, float]]:
            limits = self._store.limits
            return limits.hold(self._server, places, _LEASE), limits.take(taken)

        try:
            held, used = await self._store.run(write)
        except (StorageError, OverloadedError) as error:
            self._wanted = accounts | self._wanted
            for name, _, amount in taken:
                buckets[name].taken += amount
            self._be_alone(str(error))
            raise
        else:
            for name, bucket in buckets.items():
                bucket.hear(used[name])
            for owner, places_held in held.items():
                accounts[owner].places = places_held
            self._holding = {owner: accounts[owner] for owner, places_held in held.items() if places_held}
            self._heard |= dict.fromkeys(accounts, self._clock())
        finally:
            if asked is not None:
                asked.set_result(None)

    def _places(self, account: Account) -> Places:
        """Those that an account needs now. What it gives back it has no more, even before the database knows."""
        most = account.key.max_concurrency
        assert most is not None
        wanted = min(most, account.num_running + self._waiting[account.owner])
        if account.places is not None:
            account.places = min(account.places, wanted)
        return Places(account.owner, most, wanted)

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
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RENEWAL if self._holding else None):
                    await self._news.wait()
            self._news.clear()
            self._hurry.clear()
            try:
                await self.tell()
            except (StorageError, OverloadedError):
                self._news.set()
                await asyncio.sleep(RETRY)
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
        for account in (*self._holding.values(), *self._wanted.values()):
            account.places = None
