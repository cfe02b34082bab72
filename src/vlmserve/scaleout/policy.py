"""Choose the worker of a request.

`Affinity` picks the worker with the least queue plus prefill, where cached prefixes and images cost nothing. A request
without cache hits goes to the least loaded worker.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vlmserve.scaleout.fleet import Fleet, Floats, Worker
from vlmserve.scaleout.index import CacheIndex
from vlmserve.scaleout.keys import Home, RequestKey
from vlmserve.scaleout.settings import PolicyName

Flags = npt.NDArray[np.bool_]

BALANCE = 2.0
"""Cost of a full worker, in mean prefill seconds of a request."""
MOST_OVER_MEAN = 1.2
"""A worker gets no requests for its cache while it runs more than this multiple of the mean, and at least one above
the mean."""
_MATCHES = 4
"""Maximum workers whose caches are compared."""
_LEAST_SEEN = 4
"""Minimum workers among which the least loaded one is chosen."""
_HOME_SHARE = 1.0
"""Value of a home, as a fraction of the mean seconds that caches save."""
_NEWS = 0.02
"""Weight of the latest request in moving averages."""


class Choice(NamedTuple):
    worker: Worker
    seconds: float
    """Prefill seconds there."""
    cached: float
    """Fraction of the prompt that is probably cached there."""


class Policy(ABC):
    """index: the workers' estimated caches."""

    def __init__(self, fleet: Fleet, index: CacheIndex, source: random.Random | None = None) -> None:
        self.fleet = fleet
        self.index = index
        self.random = source or random.Random()

    @abstractmethod
    def choose(self, key: RequestKey, now: float, excluded: Collection[str] = ()) -> Choice | None:
        """Choose a worker outside `excluded`; None if there is none."""

    def learn(self, key: RequestKey, seconds: float, cached: float) -> None:  # noqa: B027  not every policy has to
        """seconds: prefill without a cache. cached: the fraction that was cached."""

    def _choice(self, slot: int, key: RequestKey, cached: int | None = None) -> Choice:
        """cached: tokens; None: look them up."""
        fleet, index = self.fleet, self.index
        if cached is None:
            cached = index.cached_tokens(slot, key.segments)
        cached = min(key.tokens, cached)
        seconds = fleet.token_seconds[slot] * (key.tokens - cached)
        if key.images:
            seconds += fleet.image_seconds[slot] * sum(not index.has(slot, image) for image in key.images)
        return Choice(fleet.at(slot), float(seconds), cached / max(1, key.tokens))

    def _waits(self, now: float, excluded: Collection[str]) -> Floats:
        """Seconds until each worker would begin; infinity for unusable workers."""
        waits = self.fleet.waits(now)
        for worker_id in excluded:
            if (worker := self.fleet.get(worker_id)) is not None:
                waits[worker.slot] = np.inf
        return waits


class RoundRobin(Policy):
    _last = -1

    def choose(self, key: RequestKey, now: float, excluded: Collection[str] = ()) -> Choice | None:
        usable = np.flatnonzero(np.isfinite(self._waits(now, excluded)))
        if not len(usable):
            return None
        later = usable[usable > self._last]
        self._last = int(later[0] if len(later) else usable[0])
        return self._choice(self._last, key)


class LeastLoaded(Policy):
    """Chooses the lowest load: the wait, plus a cost for running requests."""

    _mean_seconds = 0.1
    """Mean prefill seconds of a request without a cache; a guess before the first answer."""

    def choose(self, key: RequestKey, now: float, excluded: Collection[str] = ()) -> Choice | None:
        waits = self._waits(now, excluded)
        slot = self._least(self._loads(waits, self.fleet.usage()), self.fleet.own_share())
        return None if slot is None else self._choice(slot, key)

    def learn(self, key: RequestKey, seconds: float, cached: float) -> None:
        self._mean_seconds += _NEWS * (seconds - self._mean_seconds)

    def _loads(self, waits: Floats, usage: Floats) -> Floats:
        """Seconds."""
        return waits + (BALANCE * self._mean_seconds) * usage

    def _least(self, loads: Floats, share: float) -> int | None:
        """The least loaded worker of a random subset; ties are broken at random.

        The subset is as large as this gateway's share of requests: gateways hear of each other's requests late, and
        would all choose the same worker.
        """
        if share < 1:
            loads = self._some(loads, share)
        if not len(loads) or not np.isfinite(lowest := loads.min()):
            return None
        equal = np.flatnonzero(loads == lowest)
        return int(equal[self.random.randrange(len(equal))])

    def _some(self, loads: Floats, share: float) -> Floats:
        """Loads of a random subset; infinity for others."""
        usable = np.flatnonzero(np.isfinite(loads))
        seen = max(_LEAST_SEEN, math.ceil(len(usable) * share))
        if seen >= len(usable):
            return loads
        some = loads.copy()
        some[np.roll(usable, self.random.randrange(len(usable)))[seen:]] = np.inf
        return some


class Affinity(LeastLoaded):
    """Chooses the worker where a request costs least."""

    _saved = 0.0
    """Mean seconds that caches save a request."""
    _reuse = 0.5
    """Mean fraction of prompts that was cached."""
    _continued = 0.5
    """Fraction of requests that continue a conversation."""

    def choose(self, key: RequestKey, now: float, excluded: Collection[str] = ()) -> Choice | None:
        fleet = self.fleet
        waits, usage = self._waits(now, excluded), fleet.usage()
        loads = self._loads(waits, usage)
        share = fleet.own_share()
        least = self._least(loads, share)
        if least is None:
            return None
        usable = np.isfinite(waits)
        mean = float(usage[usable].mean())
        matches = self.index.best(key.segments, _MATCHES, self.random)
        known = max(matches.values(), default=0)
        homes = self._homes(key, usable, known, share)
        best = self._choice(least, key)
        least_cost = best.seconds + loads[least]
        most = max(MOST_OVER_MEAN * mean, mean + float(fleet.per_request[least]))
        for slot in {*homes, *matches, *self._with_images(key), *self._random(usable)}:
            if not usable[slot] or usage[slot] > most:
                continue
            choice = self._choice(slot, key, matches.get(slot))
            bonus = self._bonus(slot, homes[slot], known) if slot in homes else 0.0
            if (cost := choice.seconds + loads[slot] - bonus) < least_cost:
                best, least_cost = choice, cost
        return best

    def learn(self, key: RequestKey, seconds: float, cached: float) -> None:
        super().learn(key, seconds, cached)
        self._continued += _NEWS * (key.continues - self._continued)
        self._saved += _NEWS * (cached * seconds - self._saved)
        self._reuse += _NEWS * (cached - self._reuse)

    def _bonus(self, slot: int, home: Home, known: int) -> float:
        """Seconds that this request and later ones may save at a home; 0 for a cached prefix, and if requests share
        nothing.

        known: tokens of the prompt that some worker has cached.
        """
        later = _HOME_SHARE * self._saved
        if not home.tokens:
            return self._continued * later
        unknown = home.tokens - known
        return later + self._reuse * float(self.fleet.token_seconds[slot]) * unknown if unknown > 0 else 0.0

    def _homes(self, key: RequestKey, usable: Flags, known: int, share: float) -> dict[int, Home]:
        """A cached home is kept with probability `share`, or all gateways would send popular requests there at once."""
        homes = [home for home in key.homes if not home.tokens or home.tokens > known or self.random.random() < share]
        if not homes:
            return {}
        weights = self.fleet.homes([home.number for home in homes])
        return dict(zip(np.argmax(weights * usable, axis=1).tolist(), homes, strict=True))

    def _with_images(self, key: RequestKey) -> Collection[int]:
        found: set[int] = set()
        for image in key.images[:_MATCHES]:
            found.update(self.index.some_holders(image, 2, self.random))
        return found

    def _random(self, usable: Flags) -> Collection[int]:
        """Up to two, so that a new worker gets requests that others have cached."""
        slots = [self.random.randrange(len(usable)) for _ in range(2)]
        return [slot for slot in slots if usable[slot]]


POLICIES: dict[PolicyName, type[Policy]] = {
    "affinity": Affinity,
    "least-loaded": LeastLoaded,
    "round-robin": RoundRobin,
}
