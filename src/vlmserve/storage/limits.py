"""Rate limits that several servers share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sqlalchemy import Connection, delete, func, select
from sqlalchemy.dialects import postgresql, sqlite

from vlmserve.storage.database import Database
from vlmserve.storage.tables import rate_limits, running_requests

_MINUTE = 60.0
_FORGOTTEN = 24 * 3600.0
"""Seconds after which `Limits.forget` deletes an unused limit."""


class Taken(NamedTuple):
    """name: of the limit, the same on all servers."""

    name: str
    per_minute: int
    amount: float


class Places(NamedTuple):
    name: str
    """Name of the limit, the same on all servers."""
    most: int
    """Maximum for all servers together."""
    wanted: int


class Limits:
    """Token buckets by name, which refill evenly with `per_minute`, and leases of concurrent requests."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    def take(self, taken: Sequence[Taken]) -> dict[str, float]:
        """Take amounts in one transaction. Returns the used amount of each limit by name.

        If clocks differ by some seconds, servers refill that many seconds' amount too early, once. Raises StorageError;
        then nothing was taken.
        """
        if not taken:
            return {}
        # Sorted, so that servers do not deadlock.
        now = self._clock()
        rows = [
            {"name": name, "per_minute": per_minute, "used": amount, "updated_at": now}
            for name, per_minute, amount in sorted(taken)
        ]

        def work(connection: Connection) -> dict[str, float]:
            kind, is_sqlite = (sqlite, True) if connection.dialect.name == "sqlite" else (postgresql, False)
            larger = func.max if is_sqlite else func.greatest
            new = kind.insert(rate_limits).values(rows)
            own, latest = rate_limits.c, larger(rate_limits.c.updated_at, new.excluded.updated_at)
            back = (latest - own.updated_at) * new.excluded.per_minute / _MINUTE
            adding = new.on_conflict_do_update(
                index_elements=[own.name],
                set_={
                    "per_minute": new.excluded.per_minute,
                    "used": larger(0.0, own.used - back) + new.excluded.used,
                    "updated_at": latest,
                },
            )
            return {name: used for name, used in connection.execute(adding.returning(own.name, own.used))}

        return self._database.write(work)

    def hold(self, server: str, places: Sequence[Places], seconds: float) -> dict[str, int]:
        """Replace a server's leases; they last for `seconds`. Returns the leased requests of each limit by name.

        A server gets what it wants, or what other servers leave. Servers whose clocks differ by more than `seconds` do
        not see each other's leases. Raises StorageError; then nothing changed.
        """
        now = self._clock()
        own = running_requests.c

        def work(connection: Connection) -> dict[str, int]:
            is_sqlite = connection.dialect.name == "sqlite"
            for one in sorted(places):  # so that servers do not deadlock
                if not is_sqlite:  # SQLite has one writer at a time
                    connection.execute(select(func.pg_advisory_xact_lock(_lock(one.name))))
            names = [one.name for one in places]
            of_others = (own.name.in_(names), own.server != server, own.until > now)
            taken = select(own.name, func.sum(own.held)).where(*of_others).group_by(own.name)
            left = {name: int(held) for name, held in connection.execute(taken)}
            had = {one.name: max(0, min(one.wanted, one.most - left.get(one.name, 0))) for one in places}
            connection.execute(delete(running_requests).where(own.name.in_(names), own.server == server))
            rows = [
                {"name": name, "server": server, "held": held, "until": now + seconds}
                for name, held in had.items()
                if held
            ]
            if rows:
                connection.execute(running_requests.insert(), rows)
            return had

        return self._database.write(work) if places else {}

    def forget(self) -> int:
        """Delete limits that were unused for a day; returns their number. Raises StorageError."""
        oldest = self._clock() - _FORGOTTEN
        old = delete(rate_limits).where(rate_limits.c.updated_at < oldest)
        ended = delete(running_requests).where(running_requests.c.until < oldest)
        return self._database.delete(lambda connection: sum(connection.execute(one).rowcount for one in (old, ended)))


def _lock(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(errors="replace"), digest_size=8).digest(), "big", signed=True)
