"""Sends requests after earlier answers (closed loop) or by the clock (open loop)."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlmserve.loadtest.answer import Answer
from vlmserve.loadtest.client import Client, RequestFailedError, clock
from vlmserve.loadtest.machine import Monitor, Usage
from vlmserve.loadtest.record import Record
from vlmserve.loadtest.wire import RequestFormat, answer_message
from vlmserve.loadtest.workload import Fragments, Session

_EARLY = 0.0005
"""Seconds that a request may be sent early, because timers have a resolution of a millisecond."""


@dataclass
class Counts:
    sent: int = 0
    running: int = 0
    good: int = 0
    failed: int = 0
    tokens: int = 0


@dataclass
class Outcome:
    records: list[Record] = field(default_factory=list)
    seconds: float = 0.0
    """From the first request sent to the end of the last answer."""
    usage: Usage = field(default_factory=Usage)
    stopped: str | None = None
    """Why the run ended early."""
    unfinished: int = 0
    """Requests in flight that were cancelled then."""


class Run:
    """Sends sessions once.

    times: start of each session in seconds; without them, `concurrency` run at a time. duration: seconds after which
    none starts. watch: gets every record; a returned text ends the run.
    """

    def __init__(
        self,
        client: Client,
        form: RequestFormat,
        sessions: Sequence[Session],
        *,
        times: Sequence[float] | None = None,
        concurrency: int | None = None,
        think_time: float = 0.0,
        duration: float | None = None,
        watch: Callable[[Record], str | None] = lambda record: None,
    ) -> None:
        self.counts = Counts()
        self._client, self._form, self._sessions = client, form, sessions
        self._times, self._think_time, self._duration, self._watch = times, think_time, duration, watch
        self._concurrency = concurrency or len(sessions)
        self._outcome = Outcome()
        self._stop = asyncio.Event()
        self._start = 0.0

    def stop(self, why: str) -> None:
        self._outcome.stopped = self._outcome.stopped or why
        self._stop.set()

    async def run(self, monitor: Monitor) -> Outcome:
        async with monitor:
            self._start = clock()
            await self._until_stopped(self._closed() if self._times is None else self._open(self._times))
        outcome = self._outcome
        outcome.usage = monitor.usage
        outcome.unfinished = self.counts.running
        if outcome.records:
            outcome.seconds = max(r.end for r in outcome.records) - min(r.sent for r in outcome.records)
        return outcome

    async def _until_stopped(self, sending: Coroutine[Any, Any, None]) -> None:
        work, stop = asyncio.ensure_future(sending), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
        finally:
            finished = work.done()
            for task in (work, stop):
                task.cancel()
            results = await asyncio.gather(work, stop, return_exceptions=True)
        if finished and isinstance(results[0], BaseException):
            raise results[0]

    async def _closed(self) -> None:
        waiting = iter(enumerate(self._sessions))

        async def work() -> None:
            for number, session in waiting:
                if self._is_over():
                    return
                await self._session(number, session, None)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._concurrency, len(self._sessions))):
                group.create_task(work())

    async def _open(self, times: Sequence[float]) -> None:
        slots = asyncio.Semaphore(self._concurrency)

        async def work(number: int, session: Session, due: float) -> None:
            async with slots:
                await self._session(number, session, due)

        async with asyncio.TaskGroup() as group:
            for number, (session, due) in enumerate(zip(self._sessions, times, strict=True)):
                await self._sleep_until(due)
                if self._is_over():
                    return
                group.create_task(work(number, session, due))

    async def _sleep_until(self, due: float) -> None:
        while (nap := self._start + due - clock()) > _EARLY:
            await asyncio.sleep(nap)

    def _is_over(self) -> bool:
        if self._duration is not None and clock() - self._start >= self._duration:
            self._outcome.stopped = "the duration was over"
            return True
        return False

    async def _session(self, number: int, session: Session, due: float | None) -> None:
        """Send all turns until one fails."""
        messages: list[Fragments] = []
        for place, turn in enumerate(session.turns):
            if place and self._think_time:
                due = clock() - self._start + self._think_time
                await self._sleep_until(due)
            messages.append(turn.content)
            request = self._form.request(self._client, messages, turn.max_tokens)
            is_last = place + 1 == len(session.turns)
            answer = Answer(streams=self._form.streams, keeps_text=not is_last)
            record = await self._ask(request, answer, due)
            record.session, record.turn = number, place
            record.num_images = session.num_images
            self._finish(record)
            if not record.is_good:
                return
            messages.append(answer_message(answer.text))
            due = None

    async def _ask(self, request: Sequence[bytes], answer: Answer, due: float | None) -> Record:
        reason, message = None, ""
        self.counts.sent += 1
        self.counts.running += 1
        sent = clock()
        try:
            answer.check(await self._client.send(request, answer.feed))
            end = answer.ended
        except RequestFailedError as error:
            reason, message, end = error.reason, str(error), clock()
        self.counts.running -= 1
        start = self._start
        return Record(
            scheduled=sent - start if due is None else due,
            sent=sent - start,
            end=end - start,
            times=array("d", [at - start for at in answer.times]) if self._form.streams else array("d"),
            num_tokens=len(answer.times) if answer.num_tokens is None else answer.num_tokens,
            num_prompt_tokens=answer.num_prompt_tokens,
            cached_tokens=answer.cached_tokens,
            missed_tokens=answer.missed_tokens,
            is_counted=answer.num_tokens is not None,
            reason=reason,
            message=message,
        )

    def _finish(self, record: Record) -> None:
        self._outcome.records.append(record)
        if record.is_good:
            self.counts.good += 1
            self.counts.tokens += record.num_tokens
        else:
            self.counts.failed += 1
        why = self._watch(record)
        if why is not None:
            self.stop(why)


@contextlib.asynccontextmanager
async def shown_every(seconds: float, show: Callable[[], None]) -> AsyncIterator[None]:
    """Call `show` every few seconds, and at the end."""

    async def repeat() -> None:
        while True:
            show()
            await asyncio.sleep(seconds)

    task = asyncio.ensure_future(repeat())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        show()
