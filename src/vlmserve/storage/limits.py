"""What is used up of rate limits that several servers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sqlalchemy import Connection, delete, func
from sqlalchemy.dialects import postgresql, sqlite

from vlmserve.storage.database import Database
from vlmserve.storage.tables import rate_limits

_MINUTE = 60.0
_FORGOTTEN = 24 * 3600.0
"""Seconds after which a limit that nobody used is full again, whatever was taken."""


class Taken(NamedTuple):
    """An amount that is taken of a limit. name: of the limit, the same on all servers."""

    name: str
    per_minute: int
    amount: float


class Limits:
    """Token buckets by their names: what is taken comes back evenly, `per_minute` in a minute."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    def take(self, taken: Sequence[Taken]) -> dict[str, float]:
        """Take amounts, each of another limit, in one transaction. Returns how much of each is used up, by its name.

        Servers whose clocks differ by some seconds give back that many seconds' amount too early, once. Raises
        StorageError, after which nothing is taken.
        """
        if not taken:
            return {}
        # In the same order everywhere, so that no two servers wait for each other.
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

    def forget(self) -> int:
        """Delete what nobody has used for a day; returns how many limits that were. Raises StorageError."""
        oldest = self._clock() - _FORGOTTEN
        old = delete(rate_limits).where(rate_limits.c.updated_at < oldest)
        return self._database.delete(lambda connection: connection.execute(old).rowcount)
