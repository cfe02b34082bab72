"""Batches of requests. One server at a time holds a batch, until `held_until`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
from sqlalchemy import Connection, Row, delete, func, insert, or_, select, tuple_, update

from vlmserve.errors import InvalidRequestError, NotFoundError, OverloadedError
from vlmserve.storage.database import Database
from vlmserve.storage.files import Files
from vlmserve.storage.items import Page, delete_orphans, find_row, sizes_of
from vlmserve.storage.tables import batch_results, batches, blobs

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
Outcome = Literal["failed", "completed", "expired", "cancelled"]
UNFINISHED: Sequence[Status] = ("validating", "in_progress", "finalizing", "cancelling")
RESULTS_PURPOSE = "batch_output"
"""Purpose of the files that batches write."""
JSON_LINES = "application/jsonl"
"""Media type of the files that batches read and write."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Times are seconds since 1970."""

    id: str
    owner: str
    tenant: str
    """Owner of its caches; empty: the shared caches."""
    endpoint: str
    window: str
    """As the client wrote it."""
    input_file_id: str
    input_digest: str
    output_lifetime: float | None
    """Seconds that output files are kept."""
    metadata: dict[str, str]
    created_at: float
    expires_at: float
    status: Status = "validating"
    errors: tuple[dict[str, Any], ...] = ()
    model: str | None = None
    in_progress_at: float | None = None
    finalizing_at: float | None = None
    cancelling_at: float | None = None
    ended_at: float | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    num_rows: int = 0
    num_completed: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    num_bytes: int = 0
    """Bytes of stored results; 0 after the end."""


@dataclass(frozen=True, slots=True)
class BatchResult:
    row: int
    """Index, from 0."""
    succeeded: bool
    line: bytes
    """Line of the output or error file, without newline."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class Batches:
    """Methods with `owner` see only its batches, and raise NotFoundError for other ids. Methods with `holder` change
    only batches that this server holds.
    """

    def __init__(self, database: Database, files: Files, clock: Callable[[], float]) -> None:
        self._database = database
        self._files = files
        self._clock = clock

    def create(
        self,
        owner: str,
        id: str,
        *,
        tenant: str,
        endpoint: str,
        window: str,
        seconds: float,
        input_file_id: str,
        output_lifetime: float | None,
        metadata: dict[str, str],
        most: int,
    ) -> Batch:
        """seconds: until the batch expires.

        Raises InvalidRequestError for a file with another purpose, OverloadedError if the owner has `most` unfinished
        batches.
        """

        def work(connection: Connection) -> Batch:
            try:
                file = self._files.find(connection, owner, input_file_id)
            except NotFoundError as error:
                error.param = "input_file_id"
                raise
            if file.purpose != "batch":
                message = f"input_file_id: the file {input_file_id!r:.100} was uploaded with another purpose than batch"
                raise InvalidRequestError(message, param="input_file_id")
            mine = (batches.c.owner == owner) & batches.c.status.in_(UNFINISHED)
            if connection.execute(select(func.count()).where(mine)).scalar_one() >= most:
                raise OverloadedError(f"{most} batches are unfinished already; wait for one, or cancel one")
            now = self._clock()
            batch = Batch(
                id, owner, tenant, endpoint, window, input_file_id, file.digest, output_lifetime, metadata, now,
                now + seconds,
            )  # fmt: skip
            connection.execute(insert(batches).values(used_at=batch.expires_at, **_columns(batch)))
            return batch

        return self._database.write(work)

    def get(self, owner: str, id: str) -> Batch:
        with self._database.read() as connection:
            return _batch(_find(connection, owner, id))

    def cancel(self, owner: str, id: str) -> Batch:
        """Cancel a batch but keep its results. Raises InvalidRequestError if it has ended."""

        def work(connection: Connection) -> Batch:
            batch = _batch(_find(connection, owner, id))
            if batch.status in ("cancelling", "finalizing"):
                return batch
            if batch.status not in UNFINISHED:
                raise InvalidRequestError(f"The batch is {batch.status} already", param="batch_id")
            now = self._clock()
            change = {"status": "cancelling", "cancelling_at": now}
            connection.execute(update(batches).where(batches.c.id == id).values(change))
            return replace(batch, status="cancelling", cancelling_at=now)

        return self._database.write(work)

    def claim(self, holder: str, seconds: float, most: int, busy: Sequence[str] = ()) -> list[Batch]:
        """Hold the `most` oldest unfinished batches without a holder, for `seconds`. busy: ids to skip."""

        def work(connection: Connection) -> list[Batch]:
            now = self._clock()
            free = or_(batches.c.holder.is_(None), batches.c.holder == holder, batches.c.held_until <= now)
            free &= batches.c.id.not_in(busy)
            query = select(batches).where(batches.c.status.in_(UNFINISHED), free).order_by(batches.c.created_at)
            found = [_batch(row) for row in connection.execute(query.limit(most).with_for_update(skip_locked=True))]
            mine = batches.c.id.in_([batch.id for batch in found])
            connection.execute(update(batches).where(mine).values(holder=holder, held_until=now + seconds))
            return found

        with self._database.read() as connection:
            if (
                connection.execute(select(batches.c.id).where(batches.c.status.in_(UNFINISHED)).limit(1)).first()
                is None
            ):
                return []
        return self._database.write(work)

    def hold(self, holder: str, seconds: float) -> dict[str, Status]:
        """Extend the hold of all batches of this holder; returns their status by id."""

        def work(connection: Connection) -> dict[str, Status]:
            mine = (batches.c.holder == holder) & batches.c.status.in_(UNFINISHED)
            held = update(batches).where(mine).values(held_until=self._clock() + seconds)
            rows = connection.execute(held.returning(batches.c.id, batches.c.status))
            return {row.id: row.status for row in rows}

        return self._database.write(work)

    def release(self, holder: str) -> None:
        mine = update(batches).where(batches.c.holder == holder).values(holder=None, held_until=None)
        self._database.write(lambda connection: connection.execute(mine))

    def requests(self, batch: Batch) -> bytes:
        """Return the content of the input file, even if the client deleted the file."""
        with self._database.read() as connection:
            query = select(blobs.c.data).where(blobs.c.digest == batch.input_digest)
            return bytes(connection.execute(query).scalar_one())

    def rows_done(self, id: str) -> set[int]:
        with self._database.read() as connection:
            query = select(batch_results.c.row).where(batch_results.c.batch_id == id)
            return set(connection.execute(query).scalars())

    def begin(self, holder: str, id: str, num_rows: int, model: str | None) -> Status | None:
        """Start a validated batch. Returns its status; None: another server holds it."""

        def work(connection: Connection) -> Status | None:
            counted = update(batches).where(batches.c.id == id, batches.c.holder == holder)
            counted = counted.values(num_rows=num_rows, model=model)
            status: Status | None = connection.execute(counted.returning(batches.c.status)).scalar_one_or_none()
            if status != "validating":
                return status
            change = {"status": "in_progress", "in_progress_at": self._clock()}
            connection.execute(update(batches).where(batches.c.id == id).values(change))
            return "in_progress"

        return self._database.write(work)

    def add(self, holder: str, id: str, results: Sequence[BatchResult]) -> Status | None:
        """Return the batch's status; None: another server holds it, and nothing was stored."""

        def work(connection: Connection) -> Status | None:
            succeeded = sum(result.succeeded for result in results)
            sums = {
                "num_completed": succeeded,
                "num_failed": len(results) - succeeded,
                "num_bytes": sum(len(result.line) + 1 for result in results),
                "prompt_tokens": sum(result.prompt_tokens for result in results),
                "cached_tokens": sum(result.cached_tokens for result in results),
                "completion_tokens": sum(result.completion_tokens for result in results),
            }
            counted = update(batches).where(batches.c.id == id, batches.c.holder == holder)
            counted = counted.values({name: batches.c[name] + value for name, value in sums.items()})
            status: Status | None = connection.execute(counted.returning(batches.c.status)).scalar_one_or_none()
            if status is None:
                return None
            rows = [
                {
                    "batch_id": id,
                    "row": result.row,
                    "succeeded": int(result.succeeded),
                    "num_bytes": len(result.line),
                    "body": result.line.decode(),
                }
                for result in results
            ]
            connection.execute(insert(batch_results), rows)
            return status

        return self._database.write(work)

    def end(
        self,
        holder: str,
        id: str,
        outcome: Outcome,
        new_id: Callable[[], str],
        *,
        errors: Sequence[Mapping[str, Any]] = (),
        unanswered: Sequence[bytes] = (),
    ) -> None:
        """End a batch and move its results into files.

        errors: why it failed. unanswered: extra lines of the error file. Raises StorageFullError; then the batch goes
        on.
        """

        def work(connection: Connection) -> None:
            mine = (batches.c.id == id) & (batches.c.holder == holder)
            row = connection.execute(select(batches).where(mine)).one_or_none()
            if row is None or row.status not in UNFINISHED:
                return
            now = self._clock()
            change: dict[str, Any] = {
                "status": outcome,
                "errors": msgspec.json.encode(errors).decode(),
                "ended_at": now,
                "finalizing_at": now,
                "used_at": now,
                "holder": None,
                "held_until": None,
                "num_bytes": 0,
                "num_failed": row.num_failed + len(unanswered),
            }
            for succeeded, column, kind in ((1, "output_file_id", "output"), (0, "error_file_id", "error")):
                which = (batch_results.c.batch_id == id) & (batch_results.c.succeeded == succeeded)
                query = select(batch_results.c.body).where(which).order_by(batch_results.c.row)
                lines = [body.encode() for body in connection.execute(query).scalars()]
                lines += unanswered if not succeeded else ()
                if lines:
                    change[column] = new_id()
                    self._files.insert(
                        connection, row.owner, change[column], b"\n".join((*lines, b"")), f"{id}_{kind}.jsonl",
                        RESULTS_PURPOSE, JSON_LINES, row.output_lifetime,
                    )  # fmt: skip
            connection.execute(delete(batch_results).where(batch_results.c.batch_id == id))
            connection.execute(update(batches).where(mine).values(change))

        self._database.write(work)

    def list(self, owner: str, page: Page) -> tuple[list[Batch], bool]:
        """A page of batches, newest first, and whether there are more. Raises InvalidRequestError for an unknown
        `page.after`.
        """
        with self._database.read() as connection:
            query = select(batches).where(batches.c.owner == owner)
            if page.after is not None:
                try:
                    last = _find(connection, owner, page.after)
                except NotFoundError:
                    raise InvalidRequestError(f"after: there is no batch {page.after!r:.100}", param="after") from None
                order = tuple_(batches.c.created_at, batches.c.id)
                query = query.where(order < tuple_(last.created_at, last.id))
            query = query.order_by(batches.c.created_at.desc(), batches.c.id.desc())
            rows = connection.execute(query.limit(page.limit + 1)).all()
            return [_batch(row) for row in rows[: page.limit]], len(rows) > page.limit


def delete_batch(connection: Connection, id: str) -> int:
    """Return deleted bytes. The batch's files stay."""
    mine = batch_results.c.batch_id == id
    deleted = sizes_of(connection, delete(batch_results).where(mine).returning(batch_results.c.num_bytes))
    digests = connection.execute(delete(batches).where(batches.c.id == id).returning(batches.c.input_digest))
    return deleted + delete_orphans(connection, digests.scalars().all())


def _find(connection: Connection, owner: str, id: str) -> Row[Any]:
    missing = NotFoundError(f"No batch found with id {id!r:.100}", param="batch_id")
    return find_row(connection, batches, owner, id, missing)


_JSON = ("errors", "metadata")


def _columns(batch: Batch) -> dict[str, Any]:
    fields = {name: getattr(batch, name) for name in Batch.__slots__}
    return fields | {name: msgspec.json.encode(fields[name]).decode() for name in _JSON}


def _batch(row: Row[Any]) -> Batch:
    fields = {name: getattr(row, name) for name in Batch.__slots__}
    return Batch(**{**fields, **{name: msgspec.json.decode(fields[name]) for name in _JSON}})
