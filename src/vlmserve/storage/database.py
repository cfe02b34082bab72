"""Transactions on a SQLite or PostgreSQL database, with SQLAlchemy."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, NoSuchModuleError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import StaticPool

from vlmserve.errors import ConfigurationError, StorageError
from vlmserve.storage.tables import EMPTY_WAL, LEAN_SETTINGS, SQLITE_SETTINGS, create_tables

logger = logging.getLogger(__name__)

_ATTEMPTS = 5
"""Attempts of a transaction that collides with others."""
_POSTGRESQL_TIMEOUT = 10
"""Seconds to connect."""
SQLITE_TIMEOUT = 30
"""Seconds to wait for a lock."""
_SQLITE_PAUSE = 0.02

Result = TypeVar("Result")
RESERVED_BYTES = 16 * 1024**2
"""Bytes: 4x the size that makes SQLite write its log back."""
_BLOCK = bytes(1024**2)


class Database:
    """Runs transactions. Methods block; call them from at most `num_connections` threads."""

    def __init__(self, url: str, num_connections: int) -> None:
        """Open or create a database. Raises ConfigurationError if that fails."""
        self._engine = _make_engine(_parse(url), num_connections)
        self.is_sqlite = self._engine.dialect.name == "sqlite"
        path = self._engine.url.database if self.is_sqlite else None
        self._reserve = None if path in (None, "", ":memory:") else Reserve(Path(str(path)))
        try:
            self.write(create_tables)
        except StorageError as error:
            self._engine.dispose()
            shown = self._engine.url.render_as_string(hide_password=True)
            raise ConfigurationError(f"the history {shown} cannot be opened: {error.__cause__}") from error
        except BaseException:
            self._engine.dispose()
            raise
        if self._reserve is not None:
            self._reserve.take()

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection with a snapshot of the database. Raises StorageError."""
        try:
            with self._engine.connect() as connection:
                if not self.is_sqlite:
                    connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
                with connection.begin():
                    yield connection
        except SQLAlchemyError as error:
            raise _failed(error) from error

    def write(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` in a transaction; return its result after the commit is on disk.

        Calls `work` again if another transaction collided with it. Raises StorageError; then nothing was written.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with self._engine.connect() as connection:
                    connection.execution_options(writes=True)
                    with connection.begin():
                        return work(connection)
            except SQLAlchemyError as error:
                if attempt == _ATTEMPTS or not self._collided(error):
                    raise _failed(error) from error
        raise AssertionError("unreachable")

    def delete(self, work: Callable[[Connection], Result]) -> Result:
        """Like `write`, but succeeds on a full disk: it uses the reserved space."""
        try:
            return self.write(work)
        except StorageError as error:
            if self._reserve is None or not _is_full(error.__cause__):
                raise
        logger.warning("The disk of the history is full; deleting in the reserved space")
        self._reserve.give()
        try:
            self.shrink()
            return self._delete_leanly(work)
        finally:
            self._reserve.take()

    def _delete_leanly(self, work: Callable[[Connection], Result]) -> Result:
        """Keep SQLite's log small: delete without overwriting, and free 256 pages at a time."""
        try:
            with self._engine.connect() as connection:
                cursor: sqlite3.Cursor = connection.connection.cursor()  # type: ignore[assignment]
                try:
                    for setting in LEAN_SETTINGS:
                        cursor.execute(setting)
                    connection.execution_options(writes=True)
                    with connection.begin():
                        result = work(connection)
                    while cursor.execute("PRAGMA freelist_count").fetchone()[0]:
                        cursor.execute(EMPTY_WAL).fetchall()
                        cursor.execute("PRAGMA incremental_vacuum(256)").fetchall()
                    cursor.execute(EMPTY_WAL).fetchall()
                finally:
                    for setting in SQLITE_SETTINGS:
                        set_sqlite(cursor, setting)
                    cursor.close()
                return result
        except (SQLAlchemyError, sqlite3.Error) as error:
            raise _failed(error) from error

    def _collided(self, error: SQLAlchemyError) -> bool:
        """Return whether a failed transaction may have collided with another one.

        SQLite's transactions wait instead. After a broken connection nobody knows whether the commit succeeded.
        """
        if isinstance(error, IntegrityError):
            return True
        return isinstance(error, OperationalError) and not self.is_sqlite and not error.connection_invalidated

    def shrink(self) -> None:
        """Return the space of deleted rows to the file system, except what readers still use. Raises StorageError."""
        if not self.is_sqlite:
            return  # PostgreSQL's autovacuum does it
        try:
            with contextlib.closing(self._engine.raw_connection()) as connection:
                connection.cursor().execute(EMPTY_WAL).fetchall()
        except (SQLAlchemyError, sqlite3.Error) as error:
            raise _failed(error) from error

    def close(self) -> None:
        self._engine.dispose()


def _is_full(error: BaseException | None) -> bool:
    reason = getattr(error, "orig", error)
    return isinstance(reason, sqlite3.OperationalError) and reason.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL


def _failed(error: Exception) -> StorageError:
    logger.error("The history failed: %s", error)
    return StorageError("The history cannot be read or written now; the server's log says why")


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise ConfigurationError(
            "--storage-url is no URL that SQLAlchemy knows; write one like postgresql://user:password@host/name, "
            "'memory' or 'none'"
        ) from None
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.get_backend_name() not in ("sqlite", "postgresql"):
        raise ConfigurationError(
            f"--storage-url: histories are kept in SQLite or PostgreSQL, not in {parsed.drivername}"
        )
    return parsed


def _make_engine(url: URL, num_connections: int) -> Engine:
    options: dict[str, Any] = {"pool_size": num_connections, "max_overflow": 0, "pool_pre_ping": True}
    if url.get_backend_name() == "sqlite":
        options = {"connect_args": {"check_same_thread": False, "timeout": SQLITE_TIMEOUT}}
        if url.database in (None, "", ":memory:"):
            options |= {"poolclass": StaticPool}
        else:
            options |= {"pool_size": num_connections, "max_overflow": 0}
            _make_file(Path(url.database))
    else:
        options["connect_args"] = {"connect_timeout": _POSTGRESQL_TIMEOUT}
    try:
        engine = create_engine(url, **options)
    except (ImportError, NoSuchModuleError) as error:
        raise ConfigurationError(
            f"--storage-url needs a driver that is not installed ({error}); pip install 'vlmserve[postgres]'"
        ) from None
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _make_file(path: Path) -> None:
    """Create the file so that other users cannot read it."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Closing a file drops every POSIX lock that this process has on it, also SQLite's:
        # https://www.sqlite.org/howtocorrupt.html, section 2.2
        if not path.exists():
            with contextlib.suppress(FileExistsError):
                os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        raise ConfigurationError(f"the history {path} cannot be made: {error.strerror}; try --storage-path") from None


def _prepare_sqlite(connection: Any, _: object) -> None:
    connection.isolation_level = None  # `_begin_sqlite` begins transactions, not sqlite3
    cursor = connection.cursor()
    for setting in SQLITE_SETTINGS:
        set_sqlite(cursor, setting)
    cursor.close()


def set_sqlite(cursor: sqlite3.Cursor, setting: str) -> None:
    # Changes of the journal mode ignore SQLite's busy timeout and fail at once.
    deadline = time.monotonic() + SQLITE_TIMEOUT
    while True:
        try:
            cursor.execute(setting)
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                raise
        time.sleep(_SQLITE_PAUSE)


def _begin_sqlite(connection: Connection) -> None:
    # SQLite cannot upgrade a read transaction while another one writes.
    writes = connection.get_execution_options().get("writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


class Reserve:
    """A file next to a database that only takes space.

    Without it, deletions fail on a full disk: SQLite first writes them to its log.
    """

    def __init__(self, database: Path) -> None:
        self._path = database.with_name(f"{database.name}-reserve")

    def take(self) -> None:
        """Write the reserved bytes, if the disk has room for them."""
        with contextlib.suppress(OSError):
            if self._path.stat().st_size == RESERVED_BYTES:
                return
        try:
            with open(self._path, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                for _ in range(RESERVED_BYTES // len(_BLOCK)):
                    file.write(_BLOCK)
        except OSError as error:
            logger.warning("No disk space could be reserved in %s: %s", self._path, error.strerror)
            self.give()

    def give(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()
