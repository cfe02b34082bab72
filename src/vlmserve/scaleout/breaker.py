"""A circuit breaker: sends no requests to a failing worker, then tries one at a time."""

from __future__ import annotations

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds without requests; doubled after each failed try."""
MOST_ERRORS = 3
"""Consecutive 5xx answers that open the breaker. One failed connection opens it at once."""


class Breaker:
    """Times are in seconds. Do not count client errors."""

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
