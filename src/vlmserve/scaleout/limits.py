"""Limits of API keys across gateways, through the cluster's database.

Rates: a gateway decides by its own count. At most once in `_PAUSE` seconds it writes what it admitted and reads what
all used. A request waits for the database only if its key was not read for `_FRESH` seconds, and at most `PATIENCE`
seconds. Without the database, every gateway counts alone.

Concurrency: a gateway leases places of a key when requests find none, for `_LEASE` seconds, and renews them. A dead
gateway's leases expire.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable

from vlmserve.errors import OverloadedError, StorageError
from vlmserve.scaleout.storage import is_shared
from vlmserve.server.accounts import Account
from vlmserve.settings.config import ServerConfig
from vlmserve.storage.limits import Places, Taken
from vlmserve.storage.store import Store, open_store

logger = logging.getLogger(__name__)

_FRESH = 1.0
"""Seconds that a key's state counts as fresh."""
PATIENCE = 0.25
"""Maximum seconds that a request waits for the state of its key."""
_PAUSE = 0.05
"""Minimum seconds between two transactions of a gateway."""
RETRY = 1.0
"""Seconds between transactions while the database does not answer."""
_LEASE = 15.0
"""Seconds that a gateway's places stay valid."""
_RENEWAL = 5.0
"""Seconds between renewals of places."""


class ClusterLimits:
    """Use it from one thread with an event loop. It closes the store."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._server = secrets.token_hex(8)
        self._waiting: Counter[str] = Counter()
        """Requests that wait for a place, by account owner."""
        self._holding: dict[str, Account] = {}
        """Accounts that have places."""
        self._heard: dict[str, float] = {}
        """Time of the last read, by account owner."""
        self._wanted: dict[str, Account] = {}
        """Accounts of the next transaction."""
        self._news, self._hurry = asyncio.Event(), asyncio.Event()
        self._asked: asyncio.Future[None] | None = None
        """Done after the next transaction."""
        self._is_away = False
        self._telling: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, config: ServerConfig) -> ClusterLimits | None:
        """None without a shared database. Raises ConfigurationError."""
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
            self._be_alone("it did not answer in time")
            account.places = None
        elif is_limited:
            self._want(account)  # returns the place if the request does not run after all

    def _is_fresh(self, account: Account) -> bool:
        heard = self._heard.get(account.owner)
        return not account.buckets or (heard is not None and self._clock() - heard < _FRESH)

    def _lacks_place(self, account: Account) -> bool:
        """True if a request needs a place that other gateways may have left."""
        most = account.key.max_concurrency
        wanted = account.num_running + self._waiting[account.owner] + 1
        return most is not None and (account.places or 0) < wanted <= most

    async def tell(self) -> None:
        """Cancelling does not interrupt a transaction. Raises StorageError or OverloadedError."""
        telling = asyncio.ensure_future(self._tell())
        try:
            await asyncio.shield(telling)
        except asyncio.CancelledError:
            await asyncio.wait((telling,))
            telling.exception()  # the next transaction repeats a failed one
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
        """Places to return are given up at once."""
        most = account.key.max_concurrency
        assert most is not None
        wanted = min(most, account.num_running + self._waiting[account.owner])
        if account.places is not None:
            account.places = min(account.places, wanted)
        return Places(account.owner, most, wanted)

    async def close(self) -> None:
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
