"""Files: named references to blobs, which are stored once per content."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, delete, insert, or_, select, tuple_

from vlmserve.errors import InvalidRequestError, NotFoundError
from vlmserve.storage.database import Database
from vlmserve.storage.items import Page, delete_orphans, digest_of, insert_blobs
from vlmserve.storage.tables import blobs, files


@dataclass(frozen=True, slots=True)
class File:
    """media_type: such as ``image/png``, detected. Times are seconds since 1970."""

    id: str
    filename: str
    purpose: str
    media_type: str
    num_bytes: int
    created_at: float
    expires_at: float | None


class Files:
    """Methods see only the owner's files, and raise NotFoundError for other ids."""

    def __init__(self, database: Database, clock: Callable[[], float], max_blob_bytes: int) -> None:
        self._database = database
        self._clock = clock
        self._max_blob_bytes = max_blob_bytes

    def create(
        self, owner: str, id: str, data: bytes, filename: str, purpose: str, media_type: str, lifetime: float | None
    ) -> File:
        """lifetime: seconds until the file is deleted. Raises StorageFullError."""

        def work(connection: Connection) -> File:
            return self.insert(connection, owner, id, data, filename, purpose, media_type, lifetime)

        return self._database.write(work)

    def insert(
        self,
        connection: Connection,
        owner: str,
        id: str,
        data: bytes,
        filename: str,
        purpose: str,
        media_type: str,
        lifetime: float | None,
    ) -> File:
        now, digest = self._clock(), digest_of(data)
        expires_at = None if lifetime is None else now + lifetime
        file = File(id, filename, purpose, media_type, len(data), now, expires_at)
        insert_blobs(connection, {digest: data}, self._max_blob_bytes)
        columns = {field: getattr(file, field) for field in File.__slots__}
        connection.execute(insert(files).values(owner=owner, digest=digest, used_at=now, **columns))
        return file

    def get(self, owner: str, id: str) -> File:
        with self._database.read() as connection:
            return _file(self.find(connection, owner, id))

    def content(self, owner: str, id: str) -> bytes:
        with self._database.read() as connection:
            digest = self.find(connection, owner, id).digest
            return bytes(connection.execute(select(blobs.c.data).where(blobs.c.digest == digest)).scalar_one())

    def list(self, owner: str, page: Page, purpose: str | None) -> tuple[list[File], bool]:
        """A page of files by age, and whether there are more.

        Raises InvalidRequestError for an unknown `page.after`.
        """
        order = tuple_(files.c.created_at, files.c.id)
        with self._database.read() as connection:
            query = select(files).where(files.c.owner == owner, self._alive())
            if purpose is not None:
                query = query.where(files.c.purpose == purpose)
            if page.after is not None:
                try:
                    row = self.find(connection, owner, page.after)
                except NotFoundError:
                    raise InvalidRequestError(f"after: there is no file {page.after!r:.100}", param="after") from None
                last = tuple_(row.created_at, row.id)
                query = query.where(order > last if page.ascending else order < last)
            columns = (files.c.created_at, files.c.id)
            query = query.order_by(*(column if page.ascending else column.desc() for column in columns))
            rows = connection.execute(query.limit(page.limit + 1)).all()
            return [_file(row) for row in rows[: page.limit]], len(rows) > page.limit

    def delete(self, owner: str, id: str) -> None:
        def work(connection: Connection) -> None:
            self.find(connection, owner, id)
            delete_file(connection, id)

        self._database.delete(work)

    def _alive(self) -> ColumnElement[bool]:
        return or_(files.c.expires_at.is_(None), files.c.expires_at > self._clock())

    def find(self, connection: Connection, owner: str, id: str) -> Row[Any]:
        query = select(files).where(files.c.id == id, files.c.owner == owner, self._alive())
        row = connection.execute(query).one_or_none()
        if row is None:
            raise NotFoundError(f"No such File object: {id:.100}", param="id")
        return row


def delete_file(connection: Connection, id: str) -> int:
    """Keep bytes that something else uses. Returns deleted bytes."""
    digests = connection.execute(delete(files).where(files.c.id == id).returning(files.c.digest)).scalars().all()
    return delete_orphans(connection, digests)


def _file(row: Row[Any]) -> File:
    return File(**{field: getattr(row, field) for field in File.__slots__})
