"""Threads that divide slow work fairly among clients. Imports no torch."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from vlmserve.errors import UnavailableError

logger = logging.getLogger(__name__)

IDLE_SECONDS = 5.0
"""An idle thread ends after this time."""
_MAX_IDLE_CLIENTS = 1024
"""Maximum number of idle clients whose used time is kept."""
Result = TypeVar("Result")


class _Work(NamedTuple):
    future: Future[Any]
    run: Callable[[], Any]
    cost: float


class FairWorkers:
    """First serves the client that used the least time, with its cheapest task.

    Threads start on demand and end when idle. Tasks fail if no thread can start.
    """

    def __init__(self, name: str, threads: int, per_client: int | None = None) -> None:
        self._name = name
        self._threads = threads
        self._per_client = per_client or threads
        self._changed = threading.Condition()
        self._waiting: dict[str, list[_Work]] = {}
        self._running: Counter[str] = Counter()
        self._used: dict[str, float] = {}
        """Seconds that each client has used."""
        self._served = 0.0
        """Used seconds of the last client served. A client that returns after a pause starts from here."""
        self._num_threads = self._num_idle = 0

    def submit(self, client: str, run: Callable[[], Result], cost: float = 0.0) -> Future[Result]:
        """cost: expected seconds, compared only with the client's other tasks."""
        future: Future[Result] = Future()
        with self._changed:
            if client not in self._waiting and not self._running[client]:
                self._used[client] = max(self._used.get(client, 0.0), self._served)
            work = _Work(future, run, cost)
            self._waiting.setdefault(client, []).append(work)
            self._changed.notify()
            num_waiting = sum(map(len, self._waiting.values()))
            if num_waiting > self._num_idle and self._num_threads < self._threads and not self._start_thread():
                self._remove(client, work)
                future.set_exception(UnavailableError("the server has too few threads; retry later"))
        return future

    def _start_thread(self) -> bool:
        """Return whether any thread runs."""
        self._num_threads += 1
        try:
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()
        except Exception:
            self._num_threads -= 1
            logger.warning("Thread %s did not start", self._name, exc_info=True)
        return self._num_threads > 0

    def _serve(self) -> None:
        while (taken := self._take()) is not None:
            client, work = taken
            began = time.perf_counter()
            if work.future.set_running_or_notify_cancel():
                try:
                    result = work.run()
                except BaseException as error:
                    work.future.set_exception(error)
                else:
                    work.future.set_result(result)
            self._note(client, time.perf_counter() - began)
            del taken, work  # keep no results alive

    def _take(self) -> tuple[str, _Work] | None:
        """Return None after `IDLE_SECONDS`."""
        with self._changed:
            self._num_idle += 1
            try:
                if not self._changed.wait_for(self._has_turn, IDLE_SECONDS):
                    self._num_threads -= 1
                    return None
            finally:
                self._num_idle -= 1
            client = min(filter(self._may_run, self._waiting), key=self._used.__getitem__)
            work = min(self._waiting[client], key=lambda work: work.cost)
            self._remove(client, work)
            self._running[client] += 1
            self._served = max(self._served, self._used[client])
            return client, work

    def _remove(self, client: str, work: _Work) -> None:
        queue = self._waiting[client]
        queue.remove(work)
        if not queue:
            del self._waiting[client]

    def _has_turn(self) -> bool:
        return any(map(self._may_run, self._waiting))

    def _may_run(self, client: str) -> bool:
        return self._running[client] < self._per_client

    def _note(self, client: str, seconds: float) -> None:
        with self._changed:
            self._used[client] += seconds
            self._running[client] -= 1
            self._running += Counter()  # drops zeros
            if self._waiting:
                self._changed.notify()
            if len(self._used) > _MAX_IDLE_CLIENTS:
                busy = self._waiting.keys() | self._running.keys()
                self._used = {name: used for name, used in self._used.items() if name in busy}
