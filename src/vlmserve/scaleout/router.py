"""Route requests to workers, and learn from their reports."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable

from vlmserve.scaleout.fleet import Fleet, Worker
from vlmserve.scaleout.index import CacheIndex
from vlmserve.scaleout.keys import RequestKey
from vlmserve.scaleout.messages import Feedback, HeldPrompt, Load, WorkerInfo
from vlmserve.scaleout.policy import POLICIES
from vlmserve.scaleout.settings import PolicyName

_UNKNOWN_HISTORY = 2048
"""Guessed tokens of a history of unknown length."""


class Router:
    """Use it from one thread. clock: seconds. max_entries: digests to remember."""

    def __init__(
        self,
        policy: PolicyName = "affinity",
        *,
        clock: Callable[[], float] = time.monotonic,
        source: random.Random | None = None,
        max_entries: int = 2_000_000,
    ) -> None:
        self.clock = clock
        self.fleet = Fleet()
        self.index = CacheIndex(max_entries)
        self.policy = POLICIES[policy](self.fleet, self.index, source)

    def set_workers(self, infos: Iterable[WorkerInfo]) -> None:
        current = {info.id: info for info in infos}
        for worker in list(self.fleet):
            if worker.info.id not in current:
                self.fleet.remove(worker.info.id)
                self.index.remove_worker(worker.slot)
        for info in current.values():
            known = self.fleet.get(info.id)
            if known is None:
                worker = self.fleet.add(info)
                self.index.add_worker(worker.slot, info.cache_tokens)
            elif known.info != info:
                self.fleet.update(info)
                self._see_epoch(known, info.epoch)

    def route(self, key: RequestKey, excluded: Collection[str] = ()) -> Route | None:
        """None: no usable worker."""
        now = self.clock()
        if key.follows is not None:
            key = self._with_history(key, key.follows)
        choice = self.policy.choose(key, now, excluded)
        if choice is None:
            return None
        worker = choice.worker
        # Insert before the answer, so that concurrent requests go to the same cache.
        self.index.insert(worker.slot, key.segments, key.images)
        self.fleet.begin(worker, choice.seconds, now)
        return Route(self, key, worker, choice.seconds, choice.cached)

    def news_left(self, seconds: float) -> float:
        """How much is left of the `seconds` after a worker's latest failure."""
        return max(0.0, self.fleet.failed_at + seconds - self.clock())

    def _with_history(self, key: RequestKey, id: str) -> RequestKey:
        """Add the known length of a stored response to the key."""
        digest = key.history(id)
        length = self.index.lengths.get(digest)
        if length is None and (worker := self.fleet.tagged(id)) is not None:
            # Only the gateway that sent it there knows the length.
            length = _UNKNOWN_HISTORY
            self.index.insert_history(worker.slot, digest, length, 0)
        return key if length is None else key.after(length)

    def report(self, worker_id: str, load: Load, prompts: Iterable[HeldPrompt] = ()) -> None:
        """prompts: cached for other gateways' requests."""
        if (worker := self.fleet.get(worker_id)) is not None:
            self._hear(worker, load)
            for prompt in prompts:
                self.index.insert_prompt(worker.slot, prompt.digest, prompt.added, prompt.images)

    def _hear(self, worker: Worker, load: Load) -> None:
        self.fleet.report(worker, load, self.clock())
        self._see_epoch(worker, load.epoch)

    def _see_epoch(self, worker: Worker, epoch: str) -> None:
        if epoch and epoch != worker.epoch:
            if worker.epoch and self.fleet.has(worker):
                self.index.forget(worker.slot)
            worker.epoch = epoch


class Route:
    """End it with `finish`, `fail` or `abandon`."""

    def __init__(self, router: Router, key: RequestKey, worker: Worker, seconds: float, cached: float) -> None:
        self.worker = worker
        self.cached = cached
        self._router = router
        self._key = key
        self._seconds = seconds
        self._waits = True
        self._is_over = False

    def begin(self, feedback: Feedback) -> None:
        """Learn what was cached."""
        router, worker = self._router, self.worker
        self.started()
        router.fleet.heal(worker)
        router._hear(worker, feedback.load)
        if not feedback.prompt_tokens:
            return
        actual = feedback.cached_tokens / feedback.prompt_tokens
        if router.fleet.has(worker):
            router.index.correct(worker.slot, self.cached, actual)
            whole = router.fleet.whole_seconds(worker, self._key.tokens, len(self._key.images))
            router.policy.learn(self._key, whole, actual)

    def started(self) -> None:
        if self._waits:
            self._waits = False
            self._router.fleet.prefilled(self.worker, self._seconds)

    def finish(self) -> None:
        self._end()
        self._router.fleet.heal(self.worker)

    def hear_end(self, feedback: Feedback) -> None:
        """The last report may come after `finish`."""
        router, worker = self._router, self.worker
        router._hear(worker, feedback.load)
        if feedback.response_id is not None and router.fleet.has(worker):
            length, added = feedback.prompt_tokens + feedback.completion_tokens, feedback.completion_tokens
            router.index.insert_history(worker.slot, self._key.history(feedback.response_id), length, added)
            if self._key.conversation is not None:
                router.index.insert_history(worker.slot, self._key.history(self._key.conversation), length, 0)

    def fail(self, *, connection: bool) -> None:
        """connection: no answer or a broken one; otherwise a 5xx."""
        self._end()
        self._router.fleet.trip(self.worker, self._router.clock(), connection=connection)

    def abandon(self) -> None:
        """End because the client left, or the worker takes no requests."""
        self._end()
        self.worker.breaker.abandon()

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self.started()
            self._router.fleet.end(self.worker)
