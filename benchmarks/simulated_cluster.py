"""Simulated workers with caches and queues, and gateways with the real routing policy, on a clock of their own.

A worker prefills one request after the other, which takes time for each token and image that it has not cached, and
decodes all that it has prefilled at a speed that depends on how many there are. Its caches evict what was used least
recently, as those of an engine. A worker says how busy it is whenever an answer begins or ends, to the gateway that
sent the request, and each `BEAT` seconds to all. That reaches them `staleness` seconds later.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from vlmserve.scaleout import policy
from vlmserve.scaleout.keys import RequestKey
from vlmserve.scaleout.messages import Feedback, HeldPrompt, Load, WorkerInfo
from vlmserve.scaleout.router import Route, Router
from vlmserve.scaleout.settings import PolicyName

BEAT = 0.5
"""Seconds between two words of a worker to a gateway, as in `vlmserve.scaleout.door`."""
CAPACITY = 64
"""Requests that a worker runs at once, as gateways know it. Nothing is held back here beyond it."""


@dataclass(frozen=True)
class Speed:
    """Of an engine. Defaults: LLaVA with CLIP ViT-L/14-336 in bfloat16 on the machine of docs/performance.md, where a
    product of its size runs at 420 GFLOP/s: 366 GFLOP for an image, 160 for 592 tokens."""

    token_seconds: float = 0.00064
    image_seconds: float = 0.87
    step_seconds: float = 0.012
    """Of decoding one token for one request; each further one adds `row_seconds`."""
    row_seconds: float = 0.001


@dataclass(frozen=True)
class SimulatedRequest:
    """at: when it comes. output_tokens: length of its answer."""

    at: float
    key: RequestKey
    output_tokens: int


@dataclass(frozen=True)
class Setup:
    """A cluster. cache_tokens, cache_images: of each worker. churn: seconds between restarts of a worker; 0: none."""

    workers: int = 1000
    gateways: int = 1
    policy: PolicyName | None = "affinity"
    """None: the oracle, which sees what every worker has cached and how busy it is at this moment."""
    staleness: float = 0.0
    churn: float = 0.0
    cache_tokens: int = 32_768
    cache_images: int = 64
    speed: Speed = Speed()
    hears_others: bool = True
    """Whether workers tell each gateway of the other gateways' requests."""
    seed: int = 0


@dataclass
class Outcome:
    """What happened after the warm-up. Times in seconds. loads: mean running requests of each worker."""

    tokens: int = 0
    cached_tokens: int = 0
    images: int = 0
    cached_images: int = 0
    first_token: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    retried: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that was cached."""
        return self.cached_tokens / max(1, self.tokens)

    @property
    def load_ratio(self) -> float:
        """The load of the busiest worker over the mean."""
        return max(self.loads) * len(self.loads) / sum(self.loads)


class SimulatedWorker:
    """One engine. holders: for the oracle, which workers have a digest."""

    def __init__(self, number: int, setup: Setup, holders: dict[bytes, set[int]]) -> None:
        self.number = number
        self.epoch = 0
        self.busy_until = 0.0
        self.running = 0
        self.area = 0.0
        """Running requests times seconds."""
        self._changed = 0.0
        self._setup = setup
        self._holders = holders
        self._entries: OrderedDict[bytes, int] = OrderedDict()
        self._tokens = 0
        self._images: OrderedDict[bytes, None] = OrderedDict()

    def info(self) -> WorkerInfo:
        """As gateways know it."""
        name = f"worker-{self.number}"
        return WorkerInfo(
            name, name, "", ("model",), str(self.epoch), capacity=CAPACITY, cache_tokens=self._setup.cache_tokens
        )

    def load(self, now: float) -> Load:
        """As it says it itself."""
        speed = self._setup.speed
        waits = max(0.0, self.busy_until - now)
        return Load(str(self.epoch), self.running, waits, speed.token_seconds, speed.image_seconds)

    def count(self, change: int, now: float) -> None:
        """So many more requests are running."""
        self.area += self.running * (now - self._changed)
        self._changed = now
        self.running += change

    def restart(self, now: float) -> None:
        """All that it had is gone."""
        for digest in self._entries:
            self._holders[digest].discard(self.number)
        for image in self._images:
            self._holders[image].discard(self.number)
        self._entries.clear()
        self._images.clear()
        self._tokens = 0
        self.epoch += 1
        self.busy_until = now
        self.count(-self.running, now)

    def cached(self, key: RequestKey) -> tuple[int, int]:
        """Tokens of the prompt's beginning and images that are cached."""
        tokens = 0
        for segment in key.segments:
            if segment.digest not in self._entries:
                break
            tokens = segment.tokens
        return tokens, sum(image in self._images for image in key.images)

    def use(self, key: RequestKey) -> None:
        """Have all of a request cached, and evict what was used least recently."""
        before = [0, *(segment.tokens for segment in key.segments)]
        for (digest, tokens), start in reversed(list(zip(key.segments, before, strict=False))):
            if digest not in self._entries:
                self._entries[digest] = tokens - start
                self._tokens += tokens - start
                self._holders[digest].add(self.number)
            self._entries.move_to_end(digest)
        for image in key.images:
            self._images[image] = None
            self._images.move_to_end(image)
            self._holders[image].add(self.number)
        while self._tokens > self._setup.cache_tokens:
            digest, tokens = self._entries.popitem(last=False)
            self._tokens -= tokens
            self._holders[digest].discard(self.number)
        while len(self._images) > self._setup.cache_images:
            image, _ = self._images.popitem(last=False)
            self._holders[image].discard(self.number)


class Simulation:
    """One run of requests through a cluster."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.now = 0.0
        self.outcome = Outcome()
        self._mean_seconds = 0.0
        self._random = random.Random(setup.seed)
        self._holders: dict[bytes, set[int]] = defaultdict(set)
        self.workers = [SimulatedWorker(number, setup, self._holders) for number in range(setup.workers)]
        self._by_name = {worker.info().id: worker for worker in self.workers}
        self._prompts: list[list[list[HeldPrompt]]] = [[[] for _ in range(setup.gateways)] for _ in self.workers]
        """By worker and gateway, those of other gateways that it is to hear of."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.routers = [] if setup.policy is None else [self._router(setup.policy) for _ in range(setup.gateways)]

    def run(self, requests: Iterable[SimulatedRequest], warm_up: float) -> Outcome:
        """What happens to the requests that come after `warm_up` seconds."""
        end = 0.0
        for number, request in enumerate(requests):
            self._at(request.at, lambda request=request, number=number: self._arrive(request, number, warm_up))
            end = max(end, request.at)
        if self.setup.churn:
            for time in range(1, int(end / self.setup.churn)):
                self._at(time * self.setup.churn, self._restart_one)
        if self.routers:
            for worker in self.workers:
                self._at(self._random.uniform(0, BEAT), lambda worker=worker: self._beat(worker, end))
        self._at(warm_up, self._start_measuring)
        self._at(end, lambda: self._stop_measuring(warm_up))
        while self._events:
            self.now, _, act = heapq.heappop(self._events)
            act()
        return self.outcome

    def _router(self, policy: PolicyName) -> Router:
        router = Router(policy, clock=lambda: self.now, source=random.Random(self._random.random()))
        router.set_workers(worker.info() for worker in self.workers)
        return router

    def _at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), act))

    def _start_measuring(self) -> None:
        for worker in self.workers:
            worker.count(0, self.now)
            worker.area = 0.0

    def _stop_measuring(self, since: float) -> None:
        for worker in self.workers:
            worker.count(0, self.now)
            self.outcome.loads.append(worker.area / max(1e-9, self.now - since))

    def _restart_one(self) -> None:
        worker = self._random.choice(self.workers)
        worker.restart(self.now)
        for prompts in self._prompts[worker.number]:
            prompts.clear()

    def _arrive(self, request: SimulatedRequest, number: int, warm_up: float) -> None:
        counts = request.at >= warm_up
        if not self.routers:
            worker, route = self._oracle(request.key), None
        else:
            route = self.routers[number % len(self.routers)].route(request.key)
            assert route is not None
            worker = self._by_name[route.worker.info.id]
        epoch = worker.epoch
        worker.count(1, self.now)
        begins = max(self.now, worker.busy_until)
        # What it will have cached when its turn comes is what those before it have used until then.
        tokens, images = worker.cached(request.key)
        speed = self.setup.speed
        uncached, to_encode = request.key.tokens - tokens, len(request.key.images) - images
        worker.use(request.key)
        worker.busy_until = begins + uncached * speed.token_seconds + to_encode * speed.image_seconds
        first = worker.busy_until
        step = speed.step_seconds + speed.row_seconds * (worker.running - 1)
        last = first + step * request.output_tokens
        if counts:
            outcome = self.outcome
            outcome.tokens += request.key.tokens
            outcome.cached_tokens += tokens
            outcome.images += len(request.key.images)
            outcome.cached_images += images
            outcome.first_token.append(first - request.at)
            outcome.whole.append(last - request.at)
        gateway = number % max(1, len(self.routers))
        self._at(first, lambda: self._answer_begins(worker, epoch, route, request, tokens, gateway))
        self._at(last, lambda: self._answer_ends(worker, epoch, route, gateway))

    def _answer_begins(
        self,
        worker: SimulatedWorker,
        epoch: int,
        route: Route | None,
        request: SimulatedRequest,
        cached: int,
        gateway: int,
    ) -> None:
        if route is None or worker.epoch != epoch:
            return
        feedback = Feedback(worker.load(self.now), request.key.tokens, cached)
        self._at(self.now + self.setup.staleness, lambda: route.begin(feedback))
        self._tell(worker, gateway)
        if self.setup.hears_others:
            key = request.key
            held = HeldPrompt(key.segments[-1].digest, key.images, key.tokens - cached)
            for number, prompts in enumerate(self._prompts[worker.number]):
                if number != gateway:
                    prompts.append(held)

    def _beat(self, worker: SimulatedWorker, end: float) -> None:
        """A worker says how busy it is, and does so again until `end`."""
        for gateway in range(len(self.routers)):
            self._tell(worker, gateway)
        if self.now + BEAT < end:
            self._at(self.now + BEAT, lambda: self._beat(worker, end))

    def _tell(self, worker: SimulatedWorker, gateway: int) -> None:
        """A worker tells a gateway how busy it is, and what it has cached for others."""
        prompts = self._prompts[worker.number][gateway]
        self._prompts[worker.number][gateway] = []
        name, load, router = worker.info().id, worker.load(self.now), self.routers[gateway]
        if self.setup.staleness:
            self._at(self.now + self.setup.staleness, lambda: router.report(name, load, prompts))
        else:
            router.report(name, load, prompts)

    def _answer_ends(self, worker: SimulatedWorker, epoch: int, route: Route | None, gateway: int) -> None:
        if worker.epoch != epoch:
            self.outcome.retried += 1
            if route is not None:
                route.abandon()
            return
        worker.count(-1, self.now)
        if route is not None:
            feedback = Feedback(worker.load(self.now))
            route.finish()
            self._at(self.now + self.setup.staleness, lambda: route.hear_end(feedback))
            self._tell(worker, gateway)

    def _oracle(self, key: RequestKey) -> SimulatedWorker:
        """The worker where a request costs least, by what every worker has cached at this moment."""
        speed = self.setup.speed
        mean = sum(worker.running for worker in self.workers) / len(self.workers)
        balance = policy.BALANCE * self._mean_seconds / CAPACITY
        waits = [max(0.0, worker.busy_until - self.now) + balance * worker.running for worker in self.workers]
        candidates = {min(range(len(waits)), key=waits.__getitem__)}
        for digest in (*key.images, *(segment.digest for segment in key.segments)):
            candidates |= self._holders.get(digest, set())
        best, least = self.workers[0], float("inf")
        for number in candidates:
            worker = self.workers[number]
            tokens, images = worker.cached(key)
            if worker.running > max(policy.MOST_OVER_MEAN * mean, mean + 1) and (tokens or images):
                continue
            seconds = speed.token_seconds * (key.tokens - tokens)
            seconds += speed.image_seconds * (len(key.images) - images)
            if (cost := seconds + waits[number]) < least:
                best, least = worker, cost
        whole = speed.token_seconds * key.tokens + speed.image_seconds * len(key.images)
        self._mean_seconds += 0.02 * (whole - self._mean_seconds)
        return best


def simulate(setup: Setup, requests: Sequence[SimulatedRequest], warm_up: float) -> Outcome:
    """What happens to requests in a cluster after `warm_up` seconds."""
    return Simulation(setup).run(requests, warm_up)
