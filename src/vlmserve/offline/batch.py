"""Answers lists of requests in order, and prepares a bounded number ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from vlmserve.errors import InvalidRequestError, InvalidRequestsError
from vlmserve.offline.calls import Call, Outcome
from vlmserve.offline.engine import SharedEngine
from vlmserve.offline.requests import OfflineRequest, Prepared
from vlmserve.settings.config import OfflineConfig
from vlmserve.types import SamplingParams


@dataclass(eq=False)
class _Job:
    number: int
    params: SamplingParams
    num_bytes: int | None = None
    """Size of its prompt, once prepared."""
    num_tokens: int = 0
    """Tokens reported to `advance`."""
    request: OfflineRequest | None = None
    outcome: Outcome | None = None

    @property
    def is_ahead(self) -> bool:
        return self.request is None or not self.request.has_begun


class OfflineBatch:
    """Answers a list; worker threads prepare at most `bounds` ahead.

    window: maximum items in flight or waiting for an earlier one; None: no limit. advance: called after each step
    with finished requests and new tokens.
    """

    def __init__(
        self,
        engine: SharedEngine,
        call: Call,
        items: Iterator[tuple[Any, SamplingParams, str]],
        *,
        bounds: OfflineConfig,
        num_threads: int,
        window: int | None,
        advance: Callable[[int, int], None],
    ) -> None:
        self._engine, self._call, self._items, self._bounds = engine, call, items, bounds
        self._num_threads, self._window, self._advance = num_threads, window, advance
        self._count = self._largest = 0
        self._exhausted = False
        self._unyielded: deque[_Job] = deque()
        self._preparing: deque[tuple[_Job, Future[Prepared]]] = deque()
        self._running: list[_Job] = []
        self._errors: list[InvalidRequestError] = []

    def results(self) -> Generator[Outcome, None, None]:
        """Yield results in order. Closing aborts all requests.

        Raises InvalidRequestError, or InvalidRequestsError for several, if the call asks for errors.
        """
        executor = ThreadPoolExecutor(self._num_threads, "prepare")
        try:
            while True:
                self._fill(executor)
                self._admit(wait=not self._running)
                if self._errors:
                    self._fail(executor)
                while self._unyielded and self._unyielded[0].outcome is not None:
                    outcome = self._unyielded.popleft().outcome
                    assert outcome is not None
                    yield outcome
                if self._running:
                    self._step()
                elif self._exhausted and not self._unyielded:
                    return
        finally:
            self._engine.forget([job.request for job in self._running if job.request is not None])
            executor.shutdown(wait=True, cancel_futures=True)

    def _fill(self, executor: ThreadPoolExecutor) -> None:
        while not self._exhausted:
            if not self._call.is_prepared and self._is_far_ahead():
                return
            if self._window is not None and len(self._unyielded) >= self._window:
                return
            found = next(self._items, None)
            if found is None:
                self._exhausted = True
                return
            item, params, adapter = found
            job = _Job(self._count, params)
            self._count += 1
            self._unyielded.append(job)
            if self._call.is_prepared:
                future: Future[Prepared] = Future()
                future.set_result(self._prepare(job, item, adapter))
            else:
                future = executor.submit(self._prepare, job, item, adapter)
            self._preparing.append((job, future))

    def _is_far_ahead(self) -> bool:
        ahead = [job for job, _ in self._preparing] + [job for job in self._running if job.is_ahead]
        known = [job.num_bytes for job in ahead if job.num_bytes is not None]
        self._largest = max([self._largest, *known])
        # Assume that unprepared items equal the largest so far.
        num_bytes = sum(known) + self._largest * (len(ahead) - len(known))
        most = self._bounds.prepare_ahead if self._largest else self._num_threads
        return bool(ahead) and (len(ahead) >= most or num_bytes >= self._bounds.prepare_ahead_memory)

    def _prepare(self, job: _Job, item: Any, adapter: str) -> Prepared:
        prepared = self._call.prepare_for(adapter, item, job.params)
        job.num_bytes = prepared.num_bytes
        return prepared

    def _admit(self, *, wait: bool) -> None:
        """Add prepared requests in order, so that seeds do not depend on preparation time.

        wait: for the first.
        """
        ready: list[tuple[_Job, Prepared]] = []
        failed: list[tuple[_Job, Exception]] = []
        while self._preparing and (wait or self._preparing[0][1].done()):
            job, future = self._preparing.popleft()
            wait = False
            try:
                ready.append((job, future.result()))
            except Exception as error:
                failed.append((job, error))
        added = self._engine.add_all([(prepared, job.params) for job, prepared in ready]) if ready else ()
        for (job, _), request in zip(ready, added, strict=True):
            if isinstance(request, OfflineRequest):
                job.request = request
                self._running.append(job)
            else:
                failed.append((job, request))
        for job, failure in sorted(failed, key=lambda one: one[0].number):
            self._reject(job, failure)

    def _reject(self, job: _Job, error: Exception) -> None:
        """Raises errors that are no fault of the request."""
        self._call.name(error, job.number)
        if not isinstance(error, InvalidRequestError):
            raise error
        job.outcome = error
        self._errors += [error] if self._call.on_error == "raise" else []

    def _step(self) -> None:
        self._engine.step()
        finished: list[OfflineRequest] = []
        num_tokens = 0
        for job in self._running:
            request = job.request
            assert request is not None
            has_finished, known = request.finished, job.num_tokens
            job.num_tokens = request.num_tokens
            num_tokens += job.num_tokens - known
            if has_finished:
                job.outcome, job.request = request.result(), None
                finished.append(request)
        if finished:
            self._engine.forget(finished)
            self._running = [job for job in self._running if job.request is not None]
        self._advance(len(finished), num_tokens)

    def _fail(self, executor: ThreadPoolExecutor) -> None:
        while True:
            self._engine.forget([job.request for job in self._running if job.request is not None])
            self._running.clear()
            self._unyielded.clear()
            if self._window is None:
                self._fill(executor)
            if not self._preparing:
                break
            self._admit(wait=True)
        raise self._errors[0] if len(self._errors) == 1 else InvalidRequestsError(self._errors)
