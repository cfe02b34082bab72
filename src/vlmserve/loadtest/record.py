"""What is known of one request when it is over."""

from __future__ import annotations

from array import array
from itertools import pairwise

import msgspec


class Record(msgspec.Struct):
    """One request. All times are seconds after the test began.

    scheduled: when it should have been sent; in a closed loop, when it was. times: of each piece of the answer with
    something in it; empty without streaming. num_tokens, num_prompt_tokens: as the server counted; where it does not,
    num_tokens is the number of pieces and num_prompt_tokens None. reason: why it failed; None if it did not.
    """

    scheduled: float
    sent: float
    end: float
    times: array[float]
    num_tokens: int = 0
    num_prompt_tokens: int | None = None
    cached_tokens: int | None = None
    is_counted: bool = True
    session: int = 0
    turn: int = 0
    num_images: int = 0
    reason: str | None = None
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
        """Seconds for each token after the first, on average; None for a single token."""
        if self.num_tokens < 2 or not self.times:
            return None
        return (self.times[-1] - self.times[0]) / (self.num_tokens - 1)

    @property
    def e2el(self) -> float:
        """Seconds from sending to the answer's end."""
        return self.end - self.sent

    @property
    def delay(self) -> float:
        """Seconds that it was sent behind its time."""
        return max(0.0, self.sent - self.scheduled)

    def gaps(self) -> list[float]:
        """Seconds between pieces."""
        return [after - before for before, after in pairwise(self.times)]

    def keeps(self, objectives: dict[str, float]) -> bool:
        """Whether it has a whole answer within all bounds, counted from when it should have been sent.

        The bound of itl is for the longest gap. What a request has nothing of, like gaps of a single token, is kept.
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
