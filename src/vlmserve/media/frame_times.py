"""The text around the frames of a video, for models that read times instead of counting frames (Qwen3-VL,
https://arxiv.org/abs/2511.21631; GLM-V, https://arxiv.org/abs/2507.01006)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class FrameTimes:
    """Writes when the frames of a video are shown. encode: token ids of a text with control tokens. begin, end: the
    tokens around the placeholders of frames that share embeddings. behind: the time of the first of these frames stands
    behind them, as for GLM-V; else that in the middle of the first and the last before them, as for Qwen3-VL."""

    encode: Callable[[str], Sequence[int]]
    begin: str
    end: str
    behind: bool = False

    def text(self, seconds: Sequence[float], depth: int, num_placeholders: int) -> tuple[tuple[int, int], ...]:
        """`ImageInput.text` of a video. seconds: when each frame is shown. depth: frames that share embeddings.
        num_placeholders: of so many frames."""
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
        """The tokens before and behind frames that are shown from the one time to the other."""
        if self.behind:
            return self.encode(self.begin), self.encode(f"{self.end}{first:.1f} seconds")
        return self.encode(f"<{(first + last) / 2:.1f} seconds>{self.begin}"), self.encode(self.end)
