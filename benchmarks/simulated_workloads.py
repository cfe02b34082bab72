"""Requests for a simulated cluster: tenants with prompts of their own, images seen again, conversations, and none of
that."""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Iterator, Sequence

from blake3 import blake3

from benchmarks.simulated_cluster import SimulatedRequest
from vlmserve.scaleout.keys import DIGEST_BYTES, Home, RequestKey, Segment

SEGMENT = 128
"""Tokens of a segment."""
IMAGE_TOKENS = 576
_ROOT = bytes(32)


class Zipf:
    """Numbers from 0 to ``size - 1``, the first ones most often."""

    def __init__(self, size: int, source: random.Random, exponent: float = 1.0) -> None:
        self._sums = list(itertools.accumulate(1.0 / rank**exponent for rank in range(1, size + 1)))
        self._random = source

    def draw(self) -> int:
        return bisect.bisect_left(self._sums, self._random.random() * self._sums[-1])


class Prompt:
    """A prompt that is being put together. Pieces are named, and those with the same name are the same."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.images: list[bytes] = []
        self._path = b""
        self._instructions: Segment | None = None
        self._turns: list[Segment] = []
        self._tokens = 0

    def text(self, name: object, tokens: int) -> Prompt:
        for place in range(0, tokens, SEGMENT):
            self._add((name, place), min(SEGMENT, tokens - place))
        return self

    def image(self, name: object) -> Prompt:
        self.images.append(_digest(("image", name)))
        self._add(("image", name), IMAGE_TOKENS)
        return self

    def instructions(self, name: object, tokens: int) -> Prompt:
        self.text(name, tokens)
        self._instructions = self.segments[-1]
        return self

    def end_turn(self) -> Prompt:
        self._turns.append(self.segments[-1])
        return self

    def key(self) -> RequestKey:
        """As `request_key` makes it of a body."""
        homes = [Home(_number(self.images[0]), IMAGE_TOKENS)] if self.images else []
        if self._instructions is not None:
            homes.append(Home(_number(self._instructions.digest), self._instructions.tokens))
        first_turn = (self._turns or self.segments[-1:])[0]
        homes.append(Home(_number(first_turn.digest), self._turns[-1].tokens if self._turns else 0))
        return RequestKey(tuple(self.segments), tuple(self.images), self._tokens, tuple(homes), _ROOT)

    def _add(self, name: object, tokens: int) -> None:
        self._path = _digest((self._path, name))
        self._tokens += tokens
        self.segments.append(Segment(self._path, self._tokens))


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little")


def _digest(name: object) -> bytes:
    return blake3(repr(name).encode()).digest(DIGEST_BYTES)


def tenants(source: random.Random, workers: int) -> Iterator[Prompt]:
    """Each request has the system prompt of one of five tenants a worker, and a text of its own."""
    zipf = Zipf(5 * workers, source)
    for number in itertools.count():
        tenant = zipf.draw()
        system = 512 + SEGMENT * (tenant % 9)
        yield Prompt().instructions(("tenant", tenant), system).text(("own", number), source.randrange(64, 512))


def images(source: random.Random, workers: int) -> Iterator[Prompt]:
    """Half of the requests ask about an image that was asked about before, the others about a new one."""
    zipf = Zipf(3 * workers, source)
    for number in itertools.count():
        image = ("seen", zipf.draw()) if source.random() < 0.5 else ("new", number)
        yield Prompt().instructions("system", 64).image(image).text(("question", number), source.randrange(16, 128))


def conversations(source: random.Random, workers: int) -> Iterator[Prompt]:
    """Turns of eight conversations a worker at a time, each of which repeats all turns before it and ends after eight;
    another one begins then."""
    turns = [source.randrange(8) for _ in range(8 * workers)]
    numbers = list(range(len(turns)))
    while True:
        place = source.randrange(len(turns))
        if turns[place] == 8:
            turns[place], numbers[place] = 0, numbers[place] + len(turns)
        turns[place] += 1
        prompt = Prompt().instructions("system", 256)
        for turn in range(turns[place]):
            if turn:
                prompt.end_turn()
            prompt.text((numbers[place], turn), 128 + 64 * (place % 4))
        yield prompt


def fresh(source: random.Random, workers: int) -> Iterator[Prompt]:
    """Nothing that anybody has asked before."""
    for number in itertools.count():
        prompt = Prompt()
        if source.random() < 0.3:
            prompt.image(("fresh", number))
        yield prompt.text(("fresh text", number), source.randrange(128, 1024))


def mixed(source: random.Random, workers: int) -> Iterator[Prompt]:
    """A third each of tenants, images and conversations."""
    kinds = [make(source, workers) for make in (tenants, images, conversations)]
    while True:
        yield next(source.choice(kinds))


WORKLOADS = {"tenants": tenants, "images": images, "conversations": conversations, "mixed": mixed, "fresh": fresh}


def requests(workload: str, *, rate: float, count: int, workers: int, seed: int = 0) -> Sequence[SimulatedRequest]:
    """`count` requests that come at random, `rate` a second on average. Conversations do not wait for answers."""
    source = random.Random(seed)
    time = 0.0
    arrived = []
    for prompt in itertools.islice(WORKLOADS[workload](source, workers), count):
        time += source.expovariate(rate)
        arrived.append(SimulatedRequest(time, prompt.key(), source.randrange(256, 1024)))
    return arrived
