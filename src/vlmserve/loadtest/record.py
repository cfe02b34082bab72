from __future__ import annotations

from array import array
from itertools import pairwise

import msgspec

from vlmserve.types import Missed


class Record(msgspec.Struct):
    """One request. Times are seconds since the test began."""

    scheduled: float
    """Planned time of sending; in a closed loop, the actual time."""
    sent: float
    end: float
    times: array[float]
    """Arrival of each piece with content; empty without streaming."""
    num_tokens: int = 0
    """The server's count, or the number of pieces if it does not count."""
    num_prompt_tokens: int | None = None
    """The server's count."""
    cached_tokens: int | None = None
    missed_tokens: Missed | None = None
    is_counted: bool = True
    session: int = 0
    turn: int = 0
    num_images: int = 0
    reason: str | None = None
    """Class of the failure; None for a complete answer."""
    message: str = ""

    @property
    def is_good(self) -> bool:
        return self.reason is None

    @property
    def ttft(self) -> float | None:
        """Seconds from sending to the first token."""
        return self.times[0] - self.sent if self.times else None

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None without these."""
        if self.num_tokens < 2 or not self.times:
            return None
        return (self.times[-1] - self.times[0]) / (self.num_tokens - 1)

    @property
    def e2el(self) -> float:
        """Seconds from sending to the end of the answer."""
        return self.end - self.sent

    @property
    def delay(self) -> float:
        """Seconds from planned to actual sending."""
        return max(0.0, self.sent - self.scheduled)

    def gaps(self) -> list[float]:
        """Seconds between pieces."""
        return [after - before for before, after in pairwise(self.times)]

    def keeps(self, objectives: dict[str, float]) -> bool:
        """True if the answer is complete and meets all objectives, from the planned sending.

        itl bounds the longest gap. Metrics without a value meet any bound.
        """
        if not self.is_good:
            return False
        ttft = self.ttft
        values = {
            "ttft": None if ttft is None else ttft + self.delay,
            "tpot": self.tpot,
            "itl": max(self.gaps(), default=None) if "itl" in objectives else None,
            "e2el": self.e2el + self.delay,
        }
        return all((value := values[name]) is None or value <= bound for name, bound in objectives.items())
