"""A gateway's view of one model's workers: their load, and whether they may be used.

Arrays with one number per worker: a decision over a thousand workers takes microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from vlmserve.scaleout.messages import Load, WorkerInfo
from vlmserve.scaleout.pace import IMAGE_SECONDS, TOKEN_SECONDS

Floats = npt.NDArray[np.float64]

_GROWTH = 64

TAG_LENGTH = 8


def tag_of(name: str) -> str:
    """The prefix of a worker's response ids, which route follow-up requests."""
    return blake3(b"tag" + name.encode()).hexdigest(TAG_LENGTH // 2)


class Worker:
    """A worker and its slot: its index in the fleet's arrays."""

    def __init__(self, info: WorkerInfo, slot: int) -> None:
        self.info = info
        self.slot = slot
        self.epoch = info.epoch
        self.breaker = Breaker()


class Fleet:
    """All workers of a model.

    A worker's wait is the time until it has prefilled all accepted requests: its report plus what this gateway has sent
    since. Requests without a first token count.
    """

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._tags: dict[str, Worker] = {}
        self._slots: list[Worker | None] = []
        self._free_slots: list[int] = []
        self._open: set[int] = set()
        """Slots whose breakers are open."""
        self.failed_at = float("-inf")
        """When a breaker last opened."""
        self._busy_until = np.zeros(0)
        self.pending = np.zeros(0)
        self.sent = np.zeros(0)
        self._others = np.zeros(0)
        """Running requests of other gateways at the last report."""
        self._shut = np.zeros(0)
        """0, or infinity for a worker that takes no requests."""
        self.per_request = np.ones(0)
        """1 / capacity."""
        self.token_seconds = np.zeros(0)
        self.image_seconds = np.zeros(0)
        self._has_token_seconds = np.zeros(0, np.bool_)
        self._has_image_seconds = np.zeros(0, np.bool_)
        """True if the worker has measured its seconds."""
        self._hashes = np.zeros(0, np.uint64)

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def get(self, worker_id: str) -> Worker | None:
        return self._workers.get(worker_id)

    def has(self, worker: Worker) -> bool:
        """Requests may end after their worker left."""
        return self._slots[worker.slot] is worker

    def tagged(self, id: str) -> Worker | None:
        return self._tags.get(id.partition("_")[2][:TAG_LENGTH])

    def at(self, slot: int) -> Worker:
        worker = self._slots[slot]
        assert worker is not None
        return worker

    def add(self, info: WorkerInfo) -> Worker:
        if not self._free_slots:
            self._grow()
        slot = self._free_slots.pop()
        worker = self._slots[slot] = self._workers[info.id] = Worker(info, slot)
        for array in (self._busy_until, self.pending, self.sent, self._others):
            array[slot] = 0.0
        self._set_pace(slot, Load())
        # The name survives restarts: the worker stays the home of the same requests.
        self._hashes[slot] = int.from_bytes(blake3(info.name.encode()).digest(8), "little")
        self._tags[tag_of(info.name)] = worker
        self.update(info)
        return worker

    def update(self, info: WorkerInfo) -> None:
        worker = self._workers[info.id]
        worker.info = info
        self.per_request[worker.slot] = 1.0 / max(1, info.capacity)
        self._shut[worker.slot] = np.inf if info.draining or not worker.breaker.is_closed else 0.0

    def remove(self, worker_id: str) -> Worker:
        worker = self._workers.pop(worker_id)
        self._slots[worker.slot] = None
        if self._tags.get(tag_of(worker.info.name)) is worker:
            del self._tags[tag_of(worker.info.name)]
        self._shut[worker.slot] = np.inf
        self.sent[worker.slot] = self._others[worker.slot] = 0.0
        self._has_token_seconds[worker.slot] = self._has_image_seconds[worker.slot] = False
        self._open.discard(worker.slot)
        self._free_slots.append(worker.slot)
        return worker

    def report(self, worker: Worker, load: Load, now: float) -> None:
        if not self.has(worker):
            return
        slot = worker.slot
        # The report may be older than the latest requests.
        sent = min(self.pending[slot], self._busy_until[slot] - now)
        self._busy_until[slot] = now + max(load.queued_seconds, sent)
        self._others[slot] = max(0.0, load.running - self.sent[slot])
        self._set_pace(slot, load)

    def _set_pace(self, slot: int, load: Load) -> None:
        """Store measured seconds, or the other workers' mean before any measurement.

        A pessimistic guess would keep requests away, and never be corrected.
        """
        for seconds, measured, said, guess in (
            (self.token_seconds, self._has_token_seconds, load.token_seconds, TOKEN_SECONDS),
            (self.image_seconds, self._has_image_seconds, load.image_seconds, IMAGE_SECONDS),
        ):
            measured[slot] = said is not None
            if said is None:
                said = float(seconds[measured].mean()) if measured.any() else guess
            seconds[slot] = said

    def whole_seconds(self, worker: Worker, tokens: int, images: int) -> float:
        return float(self.token_seconds[worker.slot] * tokens + self.image_seconds[worker.slot] * images)

    def begin(self, worker: Worker, seconds: float, now: float) -> None:
        """Count a request with `seconds` of prefill, at once: the next decision needs it."""
        slot = worker.slot
        self.sent[slot] += 1
        self.pending[slot] += seconds
        self._busy_until[slot] = max(now, self._busy_until[slot]) + seconds
        worker.breaker.begin()

    def prefilled(self, worker: Worker, seconds: float) -> None:
        if self.has(worker):
            self.pending[worker.slot] = max(0.0, self.pending[worker.slot] - seconds)

    def end(self, worker: Worker) -> None:
        if self.has(worker):
            self.sent[worker.slot] -= 1

    def trip(self, worker: Worker, now: float, *, connection: bool) -> None:
        worker.breaker.fail(now, connection=connection)
        if not worker.breaker.is_closed and self.has(worker):
            self._open.add(worker.slot)
            self._shut[worker.slot] = np.inf
            self.failed_at = now

    def heal(self, worker: Worker) -> None:
        if not worker.breaker.is_closed and self.has(worker):
            self._open.discard(worker.slot)
            self._shut[worker.slot] = np.inf if worker.info.draining else 0.0
        worker.breaker.succeed()

    def waits(self, now: float) -> Floats:
        """Seconds that a new request waits for prefill; infinity for unusable workers. A new array."""
        waits: Floats = np.maximum(self._busy_until - now, 0.0)
        waits += self._shut
        for slot in self._open:
            worker = self.at(slot)
            if not worker.info.draining and worker.breaker.allows(now):
                waits[slot] = 0.0
        return waits

    def usage(self) -> Floats:
        """Running requests divided by capacity. A new array."""
        return np.asarray((self.sent + self._others) * self.per_request)

    def own_share(self) -> float:
        """This gateway's fraction of all running requests; 1 if nothing runs."""
        sent = float(self.sent.sum())
        others = float(self._others.sum())
        return sent / (sent + others) if sent + others > 0 else 1.0

    def running(self, worker: Worker) -> float:
        return float(self.sent[worker.slot] + self._others[worker.slot])

    def homes(self, keys: Sequence[int]) -> npt.NDArray[np.uint64]:
        """Weights of rendezvous hashing, ``[keys, size]`` (Thaler and Ravishankar 1998): the largest is the key's home.

        All gateways find the same home, and few keys move with a worker. splitmix64 mixes (Steele, Lea and Flood 2014).
        """
        mixed = self._hashes ^ np.array(keys, np.uint64)[:, None]
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(mixed ^ (mixed >> np.uint64(31)))

    def _grow(self) -> None:
        size = len(self._slots)
        self._slots += [None] * _GROWTH
        self._free_slots += range(size + _GROWTH - 1, size - 1, -1)
        for name in ("_busy_until", "pending", "sent", "_others", "token_seconds", "image_seconds"):
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(_GROWTH)]))
        for name in ("_has_token_seconds", "_has_image_seconds"):
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(_GROWTH, np.bool_)]))
        self._shut = np.concatenate([self._shut, np.full(_GROWTH, np.inf)])
        self.per_request = np.concatenate([self.per_request, np.ones(_GROWTH)])
        self._hashes = np.concatenate([self._hashes, np.zeros(_GROWTH, np.uint64)])


FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds without requests; doubled after each failed try."""
MOST_ERRORS = 3
"""Consecutive 5xx answers that open the breaker. One failed connection opens it at once."""


class Breaker:
    """Stops requests to a failing worker, then tries one at a time.

    Times are in seconds. Do not count client errors.
    """

    def __init__(self) -> None:
        self._errors = 0
        self._pause = FIRST_PAUSE
        self._until: float | None = None
        self._trying = False

    @property
    def is_closed(self) -> bool:
        return self._until is None

    def allows(self, now: float) -> bool:
        """Return True while closed; after the pause, for one request at a time."""
        return self._until is None or (now >= self._until and not self._trying)

    def begin(self) -> None:
        """While the breaker is open, this is the one try."""
        self._trying = self._until is not None

    def succeed(self) -> None:
        self._errors, self._pause, self._until, self._trying = 0, FIRST_PAUSE, None, False

    def abandon(self) -> None:
        """Record a request whose client left."""
        self._trying = False

    def fail(self, now: float, *, connection: bool) -> None:
        """connection: no answer, or a broken one; otherwise a 5xx."""
        self._errors += 1
        is_news = self._until is None or now >= self._until  # requests in flight fail together and count once
        if is_news and (connection or self._trying or self._errors >= MOST_ERRORS):
            self._until = now + self._pause
            self._pause = min(LONGEST_PAUSE, 2 * self._pause)
        self._trying = False
