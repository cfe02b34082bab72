"""How long a worker takes for what it has not cached, and for how long requests wait there."""

from __future__ import annotations

import time
from collections.abc import Callable

from vlmserve.server.generation import Generation

_NEWS = 0.05
"""Weight of the latest request in averages."""
TOKEN_SECONDS, IMAGE_SECONDS = 1e-4, 0.02
"""What a token of a prompt and an image take, as long as nobody has measured it."""
_LEAST = 0.01
"""Of these, what a measurement says at least: caches are worth something even where it takes no time to compute."""


class Pace:
    """Of one engine, measured by the requests that it has answered. Requests are told apart by any object."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked = self._then = clock()
        """When the average was asked for, and up to when `_area` counts."""
        self._area = 0.0
        """Of `queued_seconds` over time, since the average was asked for."""
        self.token_seconds: float | None = None
        self.image_seconds: float | None = None
        self._cached = 0.0
        """The share of prompts that was cached, on average."""
        self._images_cached = 0.0
        self._waiting: dict[object, tuple[int, int]] = {}
        """Tokens and images of the requests that have no first token yet."""
        self._tokens = self._images = 0
        """Those of all together."""

    @property
    def queued_seconds(self) -> float:
        """Of prefill, for which requests wait, by what has been cached of others."""
        tokens, images = self._tokens * (1 - self._cached), self._images * (1 - self._images_cached)
        of_token = TOKEN_SECONDS if self.token_seconds is None else self.token_seconds
        of_image = IMAGE_SECONDS if self.image_seconds is None else self.image_seconds
        return tokens * of_token + images * of_image

    def mean_queued_seconds(self) -> float:
        """The average of `queued_seconds` since this was asked for last; now, if that is now."""
        self._advance()
        passed = self._then - self._asked
        mean = self._area / passed if passed > 0 else self.queued_seconds
        self._asked, self._area = self._then, 0.0
        return mean

    def _advance(self) -> None:
        """Called before `queued_seconds` changes."""
        now = self._clock()
        self._area += (now - self._then) * self.queued_seconds
        self._then = now

    def wait(self, request: object, generation: Generation) -> None:
        """A request waits for its first token."""
        self.leave(request)
        usage = generation.usage
        tokens, images = usage.prompt_tokens, usage.prompt_tokens_details.images
        self._waiting[request] = tokens, images
        self._tokens += tokens
        self._images += images

    def leave(self, request: object) -> None:
        self._advance()
        tokens, images = self._waiting.pop(request, (0, 0))
        self._tokens -= tokens
        self._images -= images

    def begin(self, request: object, generation: Generation) -> None:
        """A request has its first token."""
        self.leave(request)
        usage, timings = generation.usage, generation.answers[0].timings
        details = usage.prompt_tokens_details
        computed = usage.prompt_tokens - details.cached_tokens
        self._cached += _NEWS * (details.cached_tokens / max(1, usage.prompt_tokens) - self._cached)
        if details.images:
            self._images_cached += _NEWS * (1 - details.images_encoded / details.images - self._images_cached)
        if timings is None:
            return
        if details.images_encoded:
            self.image_seconds = _average(self.image_seconds, timings.vision / details.images_encoded, IMAGE_SECONDS)
        if computed > 0:
            seconds = max(0.0, timings.prefill - timings.vision) / computed
            self.token_seconds = _average(self.token_seconds, seconds, TOKEN_SECONDS)


def _average(before: float | None, measured: float, usual: float) -> float:
    """before: None: there is none."""
    latest = max(measured, _LEAST * usual)
    return latest if before is None else before + _NEWS * (latest - before)
