"""The text around the frames of a video, for models that read times instead of counting frames (Qwen3-VL,
https://arxiv.org/abs/2511.21631)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class FrameTimes:
    """Writes when the frames of a video are shown. encode: token ids of a text with control tokens. begin, end: the
    tokens around the placeholders of frames that share embeddings."""

    encode: Callable[[str], Sequence[int]]
    begin: str
    end: str

    def text(self, seconds: Sequence[float], depth: int, num_placeholders: int) -> tuple[tuple[int, int], ...]:
        """`ImageInput.text` of a video. seconds: when each frame is shown. depth: frames that share embeddings: the
        time in the middle of the first and the last of them is written. num_placeholders: of so many frames."""
        seconds = [*seconds, *[seconds[-1]] * (-len(seconds) % depth)]
        end = self.encode(self.end)
        text: list[tuple[int, int]] = []
        place = 0
        for index in range(0, len(seconds), depth):
            time = (seconds[index] + seconds[index + depth - 1]) / 2
            before = self.encode(f"<{time:.1f} seconds>{self.begin}")
            text += enumerate(before, place)
            place += len(before) + num_placeholders
            text += enumerate(end, place)
            place += len(end)
        return tuple(text)
