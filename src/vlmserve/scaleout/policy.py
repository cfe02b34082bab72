"""Which worker gets a request.

`Affinity` sends a request where it costs least: where the beginning of its prompt and its images are cached, unless so
much waits there that computing them again elsewhere is sooner done. Without anything in common with earlier requests
that is the least loaded worker.
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
"""What a worker that is full costs, in mean requests' prefill seconds."""
MOST_OVER_MEAN = 1.2
"""A worker that runs more than this many times the mean, and more than one above it, gets none for what it has
cached."""
_MATCHES = 4
"""Workers whose caches are compared."""
_LEAST_SEEN = 4
"""Workers among which the least loaded one is looked for in any case."""
_HOME_SHARE = 1.0
"""Of what requests save by caches on average, what it is worth to send one where other gateways send such as it."""
_NEWS = 0.02
"""Weight of the latest request in averages."""


class Choice(NamedTuple):
    """A worker for a request. seconds: of prefill that it takes there. cached: the share of the prompt that is believed
    to be cached there."""

    worker: Worker
    seconds: float
    cached: float


class Policy(ABC):
    """Chooses workers of one fleet. index: what they have cached."""

    def __init__(self, fleet: Fleet, index: CacheIndex, source: random.Random | None = None) -> None:
        self.fleet = fleet
        self.index = index
        self.random = source or random.Random()

    @abstractmethod
    def choose(self, key: RequestKey, now: float, excluded: Collection[str] = ()) -> Choice | None:
        """A worker, but none of `excluded`; None if there is none."""

    def learn(self, key: RequestKey, seconds: float, cached: float) -> None:  # noqa: B027  not every policy has to
        """A request that takes so many seconds of prefill without a cache had that share cached."""

    def _choice(self, slot: int, key: RequestKey, cached: int | None = None) -> Choice:
        """A worker, with what the request takes there. cached: tokens that are believed to be; None: look it up."""
        fleet, index = self.fleet, self.index
        if cached is None:
            cached = index.cached_tokens(slot, key.segments)
        cached = min(key.tokens, cached)
        seconds = fleet.token_seconds[slot] * (key.tokens - cached)
        if key.images:
            seconds += fleet.image_seconds[slot] * sum(not index.has(slot, image) for image in key.images)
        return Choice(fleet.at(slot), float(seconds), cached / max(1, key.tokens))

    def _waits(self, now: float, excluded: Collection[str]) -> Floats:
        """Seconds until each worker would begin; infinity for those that may not be used."""
        waits = self.fleet.waits(now)
        for worker_id in excluded:
            if (worker := self.fleet.get(worker_id)) is not None:
                waits[worker.slot] = np.inf
        return waits


class RoundRobin(Policy):
    """Each worker in turn."""

    _last = -1

    def choose(self, key: RequestKey, now: float, excluded: Collection[str] = ()) -> Choice | None:
        usable = np.flatnonzero(np.isfinite(self._waits(now, excluded)))
        if not len(usable):
            return None
        later = usable[usable > self._last]
        self._last = int(later[0] if len(later) else usable[0])
        return self._choice(self._last, key)


class LeastLoaded(Policy):
    """The worker that begins first; of several, the one that runs the least."""

    _mean_seconds = 0.1
    """Of prefill that a request takes without a cache; until requests are answered, a guess."""

    def choose(self, key: RequestKey, now: float, excluded: Collection[str] = ()) -> Choice | None:
        waits = self._waits(now, excluded)
        slot = self._least(self._loads(waits, self.fleet.usage()), self.fleet.own_share())
        return None if slot is None else self._choice(slot, key)

    def learn(self, key: RequestKey, seconds: float, cached: float) -> None:
        self._mean_seconds += _NEWS * (seconds - self._mean_seconds)

    def _loads(self, waits: Floats, usage: Floats) -> Floats:
        """What each worker's load costs a request, in seconds."""
        return waits + (BALANCE * self._mean_seconds) * usage

    def _least(self, loads: Floats, share: float) -> int | None:
        """The least loaded worker of a part of them, by chance, which is as large as is this gateway's share of all
        requests: gateways hear of each other's late, and would all send to the same. Of equally loaded ones any."""
        if share < 1:
            loads = self._some(loads, share)
        if not len(loads) or not np.isfinite(lowest := loads.min()):
            return None
        equal = np.flatnonzero(loads == lowest)
        return int(equal[self.random.randrange(len(equal))])

    def _some(self, loads: Floats, share: float) -> Floats:
        """The same for a share of the workers that may be used; infinity for all others."""
        usable = np.flatnonzero(np.isfinite(loads))
        seen = max(_LEAST_SEEN, math.ceil(len(usable) * share))
        if seen >= len(usable):
            return loads
        some = loads.copy()
        some[np.roll(usable, self.random.randrange(len(usable)))[seen:]] = np.inf
        return some


class Affinity(LeastLoaded):
    """The worker where a request costs least, caches included."""

    _saved = 0.0
    """Seconds that caches have saved a request, on average."""
    _reuse = 0.5
    """The share of prompts that was cached, on average."""
    _continued = 0.5
    """The share of requests that continue a conversation."""

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
        """Seconds that a home is worth: what this request may find there that other gateways have sent, and what later
        ones may find because it went there. Nothing for what this gateway knows to be cached somewhere, and nothing
        once requests turn out to have nothing in common. known: tokens of the prompt that some worker has cached."""
        later = _HOME_SHARE * self._saved
        if not home.tokens:
            return self._continued * later
        unknown = home.tokens - known
        return later + self._reuse * float(self.fleet.token_seconds[slot]) * unknown if unknown > 0 else 0.0

    def _homes(self, key: RequestKey, usable: Flags, known: int, share: float) -> dict[int, Home]:
        """The workers that are homes of the request's parts. The home of what is known to be cached is compared by
        chance alone, as often as is this gateway's share of all requests: all gateways know it, and would send there at
        once what many ask for. known: tokens of the prompt that some worker has cached."""
        homes = [home for home in key.homes if not home.tokens or home.tokens > known or self.random.random() < share]
        if not homes:
            return {}
        weights = self.fleet.homes([home.number for home in homes])
        return dict(zip(np.argmax(weights * usable, axis=1).tolist(), homes, strict=True))

    def _with_images(self, key: RequestKey) -> Collection[int]:
        """Workers that have the request's images, wherever those were in other prompts."""
        found: set[int] = set()
        for image in key.images[:_MATCHES]:
            found.update(self.index.some_holders(image, 2, self.random))
        return found

    def _random(self, usable: Flags) -> Collection[int]:
        """Two workers by chance: a new one gets requests for what others have cached as well."""
        slots = [self.random.randrange(len(usable)) for _ in range(2)]
        return [slot for slot in slots if usable[slot]]


POLICIES: dict[PolicyName, type[Policy]] = {
    "affinity": Affinity,
    "least-loaded": LeastLoaded,
    "round-robin": RoundRobin,
}
