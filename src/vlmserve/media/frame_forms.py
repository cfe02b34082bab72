"""How models that take only images are shown a video: which frames, and the text around each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import numpy as np

from vlmserve.media.videos import MIN_FRAMES, Timing

USUAL_FPS, USUAL_FRAMES = 1.0, 16
"""Frames a second, and at most of a video, where neither a request nor the server says how many."""
_SKIPPED = 1
"""Seconds at both ends of a long video that SmolVLM is not shown."""
_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


class FrameForm(Protocol):
    """One way of showing videos."""

    @property
    def fps(self) -> float:
        """Frames that are a second where a list of frames comes without a rate."""
        ...

    def sample(self, num_frames: int, rate: float, fps: float | None, most: int) -> list[int]:
        """Which frames are taken of a file of so many, `rate` a second, in ascending order; at most `most`. fps: that
        the request wants of a second."""
        ...

    def words(self, seconds: Sequence[float], duration: float) -> list[str]:
        """The text before each frame, and that behind the last. seconds: when each is shown. duration: of the video,
        in seconds."""
        ...


@dataclass(frozen=True)
class TimedFrames:
    """For models that were not trained on videos in a form of their own: the time before each frame.

    server_fps: frames of a second that the server's settings want; None: `USUAL_FPS`, and at most `USUAL_FRAMES`.
    """

    server_fps: float | None = None

    @property
    def fps(self) -> float:
        return self.server_fps or USUAL_FPS

    def sample(self, num_frames: int, rate: float, fps: float | None, most: int) -> list[int]:
        wanted = fps or self.server_fps
        least, most = (MIN_FRAMES, min(most, USUAL_FRAMES)) if wanted is None else (1, most)
        return Timing(wanted or USUAL_FPS, least, most, 1, None, to_the_end=True).sample(num_frames, rate)

    def words(self, seconds: Sequence[float], duration: float) -> list[str]:
        first, *others = (f"Frame at {time:.1f} s: " for time in seconds)
        return [first, *(f"\n{text}" for text in others), "\n"]


@dataclass(frozen=True)
class SmolVLMFrames:
    """As transformers' processor of SmolVLM 2 does it. max_frames: of a file."""

    fps: float
    max_frames: int

    @classmethod
    def from_settings(cls, settings: dict[str, Any], fps: float | None) -> SmolVLMFrames | None:
        """settings: of the checkpoint's video processor; None if they are not SmolVLM's. fps: the server's, instead of
        theirs."""
        sampling = settings.get("video_sampling") or {}
        if not sampling and not str(settings.get("video_processor_type")).startswith("SmolVLM"):
            return None
        own_fps, most = (sampling.get(name) or settings.get(name) for name in ("fps", "max_frames"))
        return cls(float(fps or own_fps or 1), int(most or settings.get("num_frames") or 64))

    def sample(self, num_frames: int, rate: float, fps: float | None, most: int) -> list[int]:
        fps, most, duration = fps or self.fps, min(most, self.max_frames), num_frames / rate
        count = max(1, min(round(fps * duration), most))
        first, last = 0, num_frames - 1
        if duration - 2 * _SKIPPED > most * fps:
            first, last = int(_SKIPPED * rate), min(int(num_frames - _SKIPPED * rate), last)
        if first >= last:
            first, last = 0, num_frames - 1
        return [int(index) for index in np.unique(np.linspace(first, last, count, dtype=int))]

    def words(self, seconds: Sequence[float], duration: float) -> list[str]:
        length = timedelta(seconds=int(duration))
        intro = (
            f"You are provided the following series of {number(len(seconds))} frames from a {length} [H:MM:SS] video.\n"
        )
        before = [f"\nFrame from {int(time // 60):02d}:{int(time % 60):02d}:" for time in seconds]
        return [intro + before[0], *before[1:], "\n\n"]


@dataclass(frozen=True)
class AdjacentFrames:
    """As transformers' processor of MiniCPM-V 4.7 does it: without text. max_frames: of a file."""

    fps: float
    max_frames: int

    @classmethod
    def from_settings(cls, settings: dict[str, Any], fps: float | None) -> AdjacentFrames:
        """settings: of the checkpoint's video processor. fps: the server's; None: one frame a second."""
        return cls(fps or 1.0, int(settings.get("max_num_frames") or 128))

    def sample(self, num_frames: int, rate: float, fps: float | None, most: int) -> list[int]:
        fps, most, duration = fps or self.fps, min(most, self.max_frames), num_frames / rate
        if duration * fps > most:
            times = [round(tenth * 0.1, 1) for tenth in range(int(duration / 0.1))]
            indices = [min(int(time * rate), num_frames - 1) for time in times] or [0]
            return [indices[place] for place in np.linspace(0, len(indices) - 1, min(most, len(indices)), dtype=int)]
        return [min(int(index * rate / fps), num_frames - 1) for index in range(math.ceil(duration * fps))]

    def words(self, seconds: Sequence[float], duration: float) -> list[str]:
        return [""] * (len(seconds) + 1)


@dataclass(frozen=True)
class ClockedFrames:
    """As transformers' processor of Gemma 4 does it: minutes and seconds before each frame.

    server_fps: frames of a second that the server's settings want; None: `max_frames` of a file, evenly spread.
    """

    server_fps: float | None
    max_frames: int

    @classmethod
    def from_settings(cls, settings: dict[str, Any], fps: float | None) -> ClockedFrames:
        """settings: of the checkpoint's video processor. fps: the server's."""
        return cls(fps, int(settings.get("num_frames") or 32))

    @property
    def fps(self) -> float:
        return self.server_fps or USUAL_FPS

    def sample(self, num_frames: int, rate: float, fps: float | None, most: int) -> list[int]:
        wanted, most = fps or self.server_fps, min(most, num_frames)
        count = self.max_frames if wanted is None else max(1, int(num_frames / rate * wanted))
        count = min(count, most)
        return [index * num_frames // count for index in range(count)]

    def words(self, seconds: Sequence[float], duration: float) -> list[str]:
        times = [f"{int(time // 60):02d}:{int(time % 60):02d} " for time in seconds]
        return [times[0], *(f" {time}" for time in times[1:]), ""]


def number(value: int) -> str:
    """A whole number in English words, as num2words writes it; in digits from 1,000 on."""
    if value < len(_ONES):
        return _ONES[value]
    if value < 100:
        tens, ones = divmod(value, 10)
        return _TENS[tens - 2] + (f"-{_ONES[ones]}" if ones else "")
    if value < 1000:
        hundreds, rest = divmod(value, 100)
        return f"{_ONES[hundreds]} hundred" + (f" and {number(rest)}" if rest else "")
    return str(value)
