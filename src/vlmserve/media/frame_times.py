"""Timestamps around video frames, for models that read times.

Qwen3-VL: https://arxiv.org/abs/2511.21631. GLM-V: https://arxiv.org/abs/2507.01006.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class FrameTimes:
    """Groups of frames share embeddings."""

    encode: Callable[[str], Sequence[int]]
    """Tokenizes text with control tokens."""
    begin: str
    end: str
    time_follows: bool = False
    """Write the time of the first frame after the group (GLM-V), not the mean of first and last
    before it (Qwen3-VL)."""

    def text(self, seconds: Sequence[float], depth: int, num_placeholders: int) -> tuple[tuple[int, int], ...]:
        """`ImageInput.text` of a video. depth: frames in a group. num_placeholders: of a group."""
        seconds = [*seconds, *[seconds[-1]] * (-len(seconds) % depth)]
        text: list[tuple[int, int]] = []
        place = 0
        for index in range(0, len(seconds), depth):
            before, after = self._around(seconds[index], seconds[index + depth - 1])
            text += enumerate(before, place)
            place += len(before) + num_placeholders
            text += enumerate(after, place)
            place += len(after)
        return tuple(text)

    def _around(self, first: float, last: float) -> tuple[Sequence[int], Sequence[int]]:
        """Tokens before and after a group. first, last: times of its outer frames."""
        if self.time_follows:
            return self.encode(self.begin), self.encode(f"{self.end}{first:.1f} seconds")
        return self.encode(f"<{(first + last) / 2:.1f} seconds>{self.begin}"), self.encode(self.end)
