"""Run one batch, from its input file to its output files."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Collection, Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from vlmserve.errors import OverloadedError, StorageError
from vlmserve.server.accounts import Account
from vlmserve.server.batches.host import BatchHost
from vlmserve.server.batches.requests import Requests, WrongInputError, read_requests, unanswered
from vlmserve.server.batches.rows import RowAnswer, Rows
from vlmserve.storage.batches import Batch, BatchResult, Outcome, Status
from vlmserve.storage.store import Store

_PAUSE = 1.0
"""Seconds between attempts to write results."""
_LOOK = 0.1
"""Seconds between checks whether a key may have another row."""
_EXPIRED = "The request was not answered before the completion window ended"


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details = _Details()
    input_tokens_details: _Details = _Details()


class _Answered(msgspec.Struct):
    usage: _Usage = _Usage()


class Job:
    """A batch that this server runs. slots: shared by the rows of all batches."""

    def __init__(
        self, service: BatchHost, store: Store, rows: Rows, batch: Batch, holder: str, slots: asyncio.Semaphore
    ):
        self._service, self._store, self._rows = service, store, rows
        self._batch, self._holder, self._slots = batch, holder, slots
        self._stopped = asyncio.Event()
        self._outcome: Outcome | None = "completed"
        self._reason: dict[str, str] | None = None
        self._unwritten: list[tuple[BatchResult, asyncio.Future[None]]] = []
        self._news = asyncio.Event()
        self._num_bytes = batch.num_bytes
        self._num_running = 0

    def heed(self, status: Status | None) -> None:
        """Apply the batch's status in the database; None: another server has it."""
        if status is None:
            self._stop(None)
        elif status == "cancelling":
            self._stop("cancelled")

    async def run(self) -> None:
        """Run the batch. Raises StorageError, StorageFullError, OverloadedError or RefusedError; then any server may
        continue.
        """
        batch, store = self._batch, self._store
        with self._service.bodies.share() as share:
            data = await store.run(store.batches.requests, batch)
            share.need(len(data))
            service = self._service
            limits = service.config.max_batch_rows, service.serves_several
            try:
                requests = await asyncio.to_thread(read_requests, data, batch.endpoint, *limits)
            except WrongInputError as error:
                await store.run(store.batches.end, self._holder, batch.id, "failed", _file_id, errors=error.errors)
                return
            self.heed(await store.run(store.batches.begin, self._holder, batch.id, len(requests), requests.model))
            done = await store.run(store.batches.rows_done, batch.id)
            async with self._writing():
                await self._answer([row for row in requests.by_model() if row not in done], requests)
            if self._outcome is not None:
                await self._end(self._outcome, requests)

    def _stop(self, outcome: Outcome | None, code: str = "", message: str = "") -> None:
        if not self._stopped.is_set():
            self._outcome = outcome
            self._reason = {"code": code, "message": message} if code else None
            self._stopped.set()

    async def _answer(self, rows: Sequence[int], requests: Requests) -> None:
        if not rows or self._stopped.is_set():
            return
        left = self._batch.expires_at - time.time()
        timer = asyncio.get_running_loop().call_later(max(0.0, left), self._stop, "expired")
        asking = asyncio.ensure_future(self._ask_all(rows, requests))
        stopping = asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait((asking, stopping), return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                asking.result()
        finally:
            timer.cancel()
            await _cancel((asking, stopping))

    async def _ask_all(self, rows: Sequence[int], requests: Requests) -> None:
        tasks: set[asyncio.Task[None]] = set()

        def ended(task: asyncio.Task[None]) -> None:
            self._slots.release()
            self._num_running -= 1
            tasks.discard(task)
            if not task.cancelled() and task.exception() is not None:
                failures.append(task)

        failures: list[asyncio.Task[None]] = []
        try:
            for row in rows:
                account = await self._account()
                await self._slots.acquire()
                self._num_running += 1
                task = asyncio.ensure_future(self._ask(row, requests, account))
                tasks.add(task)
                task.add_done_callback(ended)
                if failures:
                    break
            while tasks and not failures:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
                await asyncio.sleep(0)  # run the callbacks
        finally:
            await _cancel([*tasks])
        for failed in failures:
            failed.result()

    async def _account(self) -> Account | None:
        """Wait until the batch's key may have another row; None on a server without keys.

        Half of a key's limit per minute is for interactive requests.
        """
        keys = self._service.keys
        if keys is None:
            return None
        while True:
            account = keys.of_owner(self._batch.owner)
            if account is None:
                self._stop("failed", "key_revoked", "The API key that made the batch was removed")
                await asyncio.Event().wait()  # until cancelled
            else:
                most = account.key.max_concurrency
                if (most is None or self._num_running < most) and account.begin_row():
                    return account
                await asyncio.sleep(_LOOK)

    async def _ask(self, row: int, requests: Requests, account: Account | None) -> None:
        request = requests[row]
        answer = await self._rows.answer(self._batch, account, bytes(request.body))
        result = _result(row, request.custom_id, answer)
        self._num_bytes += len(result.line) + 1
        if self._num_bytes > self._service.config.max_file_bytes:
            limit = f"{self._service.config.max_file_bytes:,} bytes, the server's limit of a file (--max-file-bytes)"
            self._stop("failed", "output_too_large", f"The answers are more than {limit}; split the batch")
        # Keeping the slot until the result is written bounds the waiting results.
        written = asyncio.get_running_loop().create_future()
        self._unwritten.append((result, written))
        self._news.set()
        await written

    @contextlib.asynccontextmanager
    async def _writing(self) -> AsyncGenerator[None, None]:
        writing = asyncio.ensure_future(self._write_all())
        try:
            yield
        finally:
            await _cancel((writing,))
            while self._unwritten and self._outcome is not None:
                await self._write()

    async def _write_all(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            if not self._unwritten:
                continue
            try:
                await self._write()
            except (StorageError, OverloadedError):
                await asyncio.sleep(_PAUSE)
                self._news.set()

    async def _write(self) -> None:
        """Write results in one transaction, which completes even if the caller is cancelled."""
        some, self._unwritten = self._unwritten, []
        store, results = self._store, [result for result, _ in some]
        adding = asyncio.ensure_future(store.run(store.batches.add, self._holder, self._batch.id, results))
        try:
            await asyncio.shield(adding)
        finally:
            if not adding.done():  # the caller was cancelled; complete the transaction
                await asyncio.wait((adding,))
            if adding.exception() is not None:
                self._unwritten = some + self._unwritten
        status = adding.result()
        for _, written in some:
            if not written.done():
                written.set_result(None)
        self.heed(status)

    async def _end(self, outcome: Outcome, requests: Requests) -> None:
        store, rest = self._store, []
        if outcome == "expired":
            done = await store.run(store.batches.rows_done, self._batch.id)
            left = (row for row in range(len(requests)) if row not in done)
            rest = [unanswered(requests, row, "batch_expired", _EXPIRED, _line_id()) for row in left]
        errors = [] if self._reason is None else [self._reason]
        await store.run(
            store.batches.end, self._holder, self._batch.id, outcome, _file_id, errors=errors, unanswered=rest
        )


def _result(row: int, custom_id: str, answer: RowAnswer) -> BatchResult:
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": msgspec.Raw(answer.body)}
    line = msgspec.json.encode({"id": _line_id(), "custom_id": custom_id, "response": response, "error": None})
    if answer.status != HTTPStatus.OK:
        return BatchResult(row, False, line)
    usage = msgspec.json.decode(answer.body, type=_Answered).usage
    return BatchResult(
        row,
        True,
        line,
        usage.prompt_tokens + usage.input_tokens,
        usage.prompt_tokens_details.cached_tokens + usage.input_tokens_details.cached_tokens,
        usage.completion_tokens + usage.output_tokens,
    )


def _line_id() -> str:
    return f"batch_req_{secrets.token_hex(16)}"


def _file_id() -> str:
    return f"file-{uuid.uuid4().hex}"


async def _cancel(tasks: Collection[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
