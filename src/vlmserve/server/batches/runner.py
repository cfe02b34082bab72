"""Choose the batches that this server runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Mapping

from vlmserve.errors import VLMServeError
from vlmserve.server.batches.host import BatchHost
from vlmserve.server.batches.job import Job
from vlmserve.server.batches.rows import OWN_ENDPOINTS, Endpoint, Rows
from vlmserve.storage.batches import Batch
from vlmserve.storage.store import Store

logger = logging.getLogger(__name__)

MOST_JOBS = 4
"""Maximum concurrent batches, so that a small one does not wait for a large one."""
_LOOKS = 3
"""Renewals during the time that a batch is held."""
_PAUSE = 30.0
"""Seconds until a failed batch is tried again."""


@contextlib.asynccontextmanager
async def batches_running(
    service: BatchHost, endpoints: Mapping[str, Endpoint] = OWN_ENDPOINTS
) -> AsyncGenerator[None, None]:
    """Run batches during the block. Afterwards other servers may continue them. endpoints: answer the requests."""
    if service.store is None or not service.config.max_batches:
        yield
        return
    runner = BatchRunner(service, service.store, Rows(service, endpoints))
    running = asyncio.ensure_future(runner.run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class BatchRunner:
    def __init__(self, service: BatchHost, store: Store, rows: Rows) -> None:
        self._service, self._store, self._rows = service, store, rows
        self._slots = asyncio.Semaphore(service.config.batch_concurrency)
        self._holder = secrets.token_hex(8)
        self._jobs: dict[str, tuple[Job, asyncio.Future[None]]] = {}
        self._later: dict[str, float] = {}

    async def run(self) -> None:
        news = self._service.batch_news
        try:
            while True:
                news.clear()
                try:
                    await self._look()
                except VLMServeError as error:  # a failure of the history; try again
                    logger.warning("Batches cannot be looked for: %s", error)
                # in Python 3.11, `asyncio.wait_for` ignores a cancellation if the event was just set
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._service.config.batch_lease / _LOOKS):
                        await news.wait()
        finally:
            working = [work for _, work in self._jobs.values()]
            for work in working:
                work.cancel()
            await asyncio.gather(*working, return_exceptions=True)
            with contextlib.suppress(VLMServeError):  # the batches become free when the hold expires
                await self._store.run(self._store.batches.release, self._holder)

    async def _look(self) -> None:
        """Renew held batches, apply decisions of other servers, and start more batches."""
        batches, seconds = self._store.batches, self._service.config.batch_lease
        if self._jobs:
            held = await self._store.run(batches.hold, self._holder, seconds)
            for id, (job, _) in self._jobs.items():
                job.heed(held.get(id))
        now = time.monotonic()
        self._later = {id: until for id, until in self._later.items() if until > now}
        room = MOST_JOBS - len(self._jobs)
        if room > 0 and self._can_answer:
            busy = [*self._jobs, *self._later]
            for batch in await self._store.run(batches.claim, self._holder, seconds, room, busy):
                self._begin(batch)

    @property
    def _can_answer(self) -> bool:
        try:
            self._service.check_serving()
        except VLMServeError:
            return False
        return True

    def _begin(self, batch: Batch) -> None:
        job = Job(self._service, self._store, self._rows, batch, self._holder, self._slots)
        work = asyncio.ensure_future(job.run())
        self._jobs[batch.id] = job, work
        work.add_done_callback(lambda work: self._ended(batch.id, work))

    def _ended(self, id: str, work: asyncio.Future[None]) -> None:
        del self._jobs[id]
        if work.cancelled():
            return
        if (error := work.exception()) is not None:
            logger.error("The batch %s stands still: %s", id, error, exc_info=not isinstance(error, VLMServeError))
            self._later[id] = time.monotonic() + _PAUSE
        self._service.batch_news.set()
