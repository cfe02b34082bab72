"""Delete data that is too old or too large."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, Select, func, literal, select, union_all

from vlmserve.storage.batches import delete_batch
from vlmserve.storage.conversations import delete_conversation
from vlmserve.storage.database import Database
from vlmserve.storage.files import delete_file
from vlmserve.storage.items import num_bytes_of
from vlmserve.storage.responses import delete_thread
from vlmserve.storage.tables import batch_results, batches, blobs, conversations, files, items, responses

_DELETE: dict[str, Callable[[Connection, str], int]] = {
    "conversation": delete_conversation,
    "thread": delete_thread,
    "file": delete_file,
    "batch": delete_batch,
}
_AT_ONCE = 32
"""Deletions in one transaction, so that other transactions wait briefly."""


class Retention:
    """Limits the age and size of a database. 0: no limit.

    max_age: seconds since the last use of a conversation, file, ended batch or thread of responses. max_bytes: the
    least recently used go first.
    """

    def __init__(self, database: Database, clock: Callable[[], float], max_age: float, max_bytes: int) -> None:
        self._database = database
        self._clock = clock
        self._max_age = max_age
        self._max_bytes = max_bytes

    def sweep(self) -> int:
        """Delete what exceeds the limits, and traces of what clients deleted. Returns the number of deletions. Raises
        StorageError.
        """
        deleted = 0
        for delete_some in (self._delete_expired, self._delete_old, self._delete_surplus):
            while count := self._database.delete(delete_some):
                deleted += count
        self._database.shrink()
        return deleted

    def _delete_expired(self, connection: Connection) -> int:
        ids = select(files.c.id).where(files.c.expires_at <= self._clock()).limit(_AT_ONCE)
        expired = connection.execute(ids).scalars().all()
        for id in expired:
            delete_file(connection, id)
        return len(expired)

    def _delete_old(self, connection: Connection) -> int:
        if not self._max_age:
            return 0
        oldest = [row for row in connection.execute(_oldest(_AT_ONCE)) if row.used_at < self._clock() - self._max_age]
        for kind, id, _ in oldest:
            _DELETE[kind](connection, id)
        return len(oldest)

    def _delete_surplus(self, connection: Connection) -> int:
        if not self._max_bytes:
            return 0
        surplus = stored_bytes(connection) - self._max_bytes
        deleted = 0
        for kind, id, _ in connection.execute(_oldest(_AT_ONCE)).all() if surplus > 0 else ():
            surplus -= _DELETE[kind](connection, id)
            deleted += 1
            if surplus <= 0:
                break
        return deleted


def stored_bytes(connection: Connection) -> int:
    return sum(num_bytes_of(connection, table) for table in (blobs, items, responses, batch_results))


def _oldest(count: int) -> Select[Any]:
    """Return kind, id and time of last use."""
    last = func.max(responses.c.created_at)
    threads = select(literal("thread").label("kind"), responses.c.thread.label("id"), last.label("used_at"))
    all_kinds = union_all(
        threads.where(responses.c.conversation_id.is_(None)).group_by(responses.c.thread),
        select(literal("conversation"), conversations.c.id, conversations.c.used_at),
        select(literal("file"), files.c.id, files.c.used_at),
        select(literal("batch"), batches.c.id, batches.c.used_at),
    ).subquery()
    return select(all_kinds).order_by(all_kinds.c.used_at, all_kinds.c.id).limit(count)
