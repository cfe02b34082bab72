"""A circuit breaker: keeps requests away from a worker that fails, and tries it again with one request at a time."""

from __future__ import annotations

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds for which a worker is avoided; doubled while it goes on failing."""
MOST_ERRORS = 3
"""Consecutive answers 5xx that open the breaker. One failed connection does: nobody listens there."""


class Breaker:
    """Of one worker. Times are seconds on a clock of the caller's. Client errors must not be counted."""

    def __init__(self) -> None:
        self._errors = 0
        self._pause = FIRST_PAUSE
        self._until: float | None = None
        self._trying = False

    @property
    def is_closed(self) -> bool:
        """Whether requests may be sent without asking `allows`."""
        return self._until is None

    def allows(self, now: float) -> bool:
        """Whether a request may be sent now: always while it is closed, one at a time once the pause is over."""
        return self._until is None or (now >= self._until and not self._trying)

    def begin(self) -> None:
        """A request is sent, perhaps to find out whether the worker is well again."""
        self._trying = self._until is not None

    def succeed(self) -> None:
        self._errors, self._pause, self._until, self._trying = 0, FIRST_PAUSE, None, False

    def abandon(self) -> None:
        """The request ended without saying anything of the worker: its client left."""
        self._trying = False

    def fail(self, now: float, *, connection: bool) -> None:
        """connection: nobody answered; else with a 5xx."""
        self._errors += 1
        is_news = self._until is None or now >= self._until  # what was under way then fails as well, and counts once
        if is_news and (connection or self._trying or self._errors >= MOST_ERRORS):
            self._until = now + self._pause
            self._pause = min(LONGEST_PAUSE, 2 * self._pause)
        self._trying = False
