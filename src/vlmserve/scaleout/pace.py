"""Measure a worker's prefill speed, and estimate how long requests wait there."""

from __future__ import annotations

import time
from collections.abc import Callable

from vlmserve.server.generation import Generation

_NEWS = 0.05
"""Weight of the latest request in moving averages."""
TOKEN_SECONDS, IMAGE_SECONDS = 1e-4, 0.02
"""Guesses for a prompt token and an image, until measured."""
_LEAST = 0.01
"""Minimum measurement, as a fraction of the guesses. Zero would make caches worthless to routing."""


class Pace:
    """The pace of one engine. Any object identifies a request."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked = self._then = clock()
        """Start of the mean, and end of the time that `_area` covers."""
        self._area = 0.0
        """Integral of `queued_seconds` over time, since `_asked`."""
        self.token_seconds: float | None = None
        self.image_seconds: float | None = None
        self._cached = 0.0
        """Mean fraction of prompts that was cached."""
        self._images_cached = 0.0
        self._waiting: dict[object, tuple[int, int]] = {}
        """Tokens and images of requests without a first token."""
        self._tokens = self._images = 0
        """Sums over `_waiting`."""

    @property
    def queued_seconds(self) -> float:
        """Prefill seconds of waiting requests, with average cache hits."""
        tokens, images = self._tokens * (1 - self._cached), self._images * (1 - self._images_cached)
        of_token = TOKEN_SECONDS if self.token_seconds is None else self.token_seconds
        of_image = IMAGE_SECONDS if self.image_seconds is None else self.image_seconds
        return tokens * of_token + images * of_image

    def mean_queued_seconds(self) -> float:
        self._advance()
        passed = self._then - self._asked
        mean = self._area / passed if passed > 0 else self.queued_seconds
        self._asked, self._area = self._then, 0.0
        return mean

    def _advance(self) -> None:
        """Call it before `queued_seconds` changes."""
        now = self._clock()
        self._area += (now - self._then) * self.queued_seconds
        self._then = now

    def wait(self, request: object, generation: Generation) -> None:
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
    """before: None for the first measurement."""
    latest = max(measured, _LEAST * usual)
    return latest if before is None else before + _NEWS * (latest - before)
