"""Video formats for models that take only images: frames to show, and text around them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import numpy as np

from vlmserve.media.videos import MIN_FRAMES, Timing

USUAL_FPS, USUAL_FRAMES = 1.0, 16
"""Default frames per second, and default maximum of a video."""
_SKIPPED = 1
"""Seconds at both ends of a long video that SmolVLM skips."""
_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


class FrameForm(Protocol):
    @property
    def fps(self) -> float:
        """Rate of a list of frames that has none."""
        ...

    def sample(self, num_frames: int, rate: float, fps: float | None, most: int) -> list[int]:
        """At most `most` ascending numbers. rate: frames per second of the file. fps: of the request."""
        ...

    def words(self, seconds: Sequence[float], duration: float) -> list[str]:
        """The text before each frame, and after the last. duration: seconds."""
        ...


@dataclass(frozen=True)
class TimedFrames:
    """Timestamps before frames, for models without a trained video format."""

    server_fps: float | None = None
    """The server's setting; None: `USUAL_FPS`, and at most `USUAL_FRAMES`."""

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
    """SmolVLM 2's format in Transformers."""

    fps: float
    max_frames: int

    @classmethod
    def from_settings(cls, settings: dict[str, Any], fps: float | None) -> SmolVLMFrames | None:
        """Return None for settings that are not SmolVLM's. fps: the server's."""
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
    """MiniCPM-V 4.7's format in Transformers, without text."""

    fps: float
    max_frames: int

    @classmethod
    def from_settings(cls, settings: dict[str, Any], fps: float | None) -> AdjacentFrames:
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
    """Gemma 4's format in Transformers: minutes and seconds before each frame."""

    server_fps: float | None
    """The server's setting; None: `max_frames` of a file, evenly spread."""
    max_frames: int

    @classmethod
    def from_settings(cls, settings: dict[str, Any], fps: float | None) -> ClockedFrames:
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
    """An integer in English words, as num2words writes it; digits from 1,000 up."""
    if value < len(_ONES):
        return _ONES[value]
    if value < 100:
        tens, ones = divmod(value, 10)
        return _TENS[tens - 2] + (f"-{_ONES[ones]}" if ones else "")
    if value < 1000:
        hundreds, rest = divmod(value, 100)
        return f"{_ONES[hundreds]} hundred" + (f" and {number(rest)}" if rest else "")
    return str(value)
