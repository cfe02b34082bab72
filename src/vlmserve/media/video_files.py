"""Decode video files with FFmpeg's libraries (PyAV, extra ``video``) in a process for each file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from PIL import Image

from vlmserve.errors import InvalidVideoError, VideoTooLargeError, VLMServeError
from vlmserve.media.decoding import DecodingMemory, frame_bytes
from vlmserve.media.image_process import heif_format
from vlmserve.media.isolated import Answer, IsolatedProcess
from vlmserve.settings.config import MediaConfig

CONTAINERS = {"mov": (4, b"ftyp"), "matroska": (0, b"\x1aE\xdf\xa3"), "avi": (8, b"AVI ")}
"""FFmpeg's names of formats, with offset and bytes of their signatures.

FFmpeg must not guess: some formats are lists of other files or URLs, which it would open.
"""
_FORMATS = {**CONTAINERS, "gif": (0, b"GIF8")}
"""All video formats; the request tells whether an animation is a video or a document."""
_LARGEST_PADDING = 1024
"""Maximum bytes of padding after a row."""


class _Opened(Answer):
    frames: int = 0
    rate: float = 0.0
    width: int = 0
    height: int = 0


class _Frame(Answer):
    width: int = 0
    height: int = 0
    stride: int = 0
    rotation: float = 0.0


class VideoFile:
    """An MP4, MOV, WebM, Matroska, AVI or GIF file in a process with limited memory and time.

    Methods raise InvalidVideoError for an unreadable file, VideoTooLargeError for too much time, memory, frames or
    pixels, and CancelledWorkError. Close the file then, and at the end.
    """

    num_frames: int
    rate: float
    """Frames per second."""

    def __init__(self, data: bytes, limits: MediaConfig) -> None:
        container = _format_of(data, _FORMATS)
        if container is None:
            raise InvalidVideoError(
                "the data is not a video in a supported format (MP4, MOV, WebM, Matroska, AVI, GIF)"
            )
        self._limits = limits
        self._asked: int | None = None
        self.process = IsolatedProcess(
            "video",
            limits.video_timeout,
            partial(_error_of, limits),
            pixel_bytes=3 * limits.max_frame_pixels,
        )
        settings = {
            "format": container,
            "memory": limits.video_memory + len(data),
            "seconds": math.ceil(limits.video_timeout) + 1,
            "max_frames": limits.max_decoded_frames,
            "max_pixels": limits.max_frame_pixels,
        }
        try:
            opened = self.process.open(data, settings, _Opened)
            self.num_frames, self.rate = opened.frames, opened.rate
            if not 1 <= self.num_frames <= limits.max_decoded_frames or not 0 < self.rate < math.inf:
                raise InvalidVideoError(f"the video has {self.num_frames} frames, {self.rate:g} a second")
        except BaseException:
            self.close()
            raise

    def ask(self, number: int) -> None:
        """Start to decode frame `number`, from 0. Ascending numbers decode each frame once."""
        if self._asked is None:
            self.process.send(str(number))
            self._asked = number

    @contextmanager
    def frame(self, number: int, memory: DecodingMemory, ahead: int | None = None) -> Iterator[Image.Image]:
        """An upright RGB frame; it takes memory during the block. ahead: the frame to decode meanwhile."""
        self.ask(number)
        assert self._asked == number
        answer = self.process.receive(_Frame)
        width, height = answer.width, answer.height
        if (
            min(width, height) < 1
            or width * height > self._limits.max_frame_pixels
            or not 3 * width <= answer.stride <= 3 * width + _LARGEST_PADDING
        ):
            raise _error_of(self._limits, "broken", "")
        with memory.share(frame_bytes(width * height)):
            pixels = self.process.pixels(answer.stride * height, answer)
            image = Image.frombytes("RGB", (width, height), pixels, "raw", ("RGB", answer.stride))
            del pixels
            self._asked = None
            if ahead is not None:
                self.ask(ahead)
            yield image.rotate(answer.rotation, expand=True) if answer.rotation else image

    def close(self) -> None:
        self.process.close()


def container_of(data: bytes) -> str | None:
    return _format_of(data, CONTAINERS)


def _format_of(data: bytes, formats: Mapping[str, tuple[int, bytes]]) -> str | None:
    if heif_format(data):
        return None
    return next((name for name, (at, mark) in formats.items() if data.startswith(mark, at)), None)


def _error_of(limits: MediaConfig, reason: str, detail: str) -> VLMServeError:
    match reason:
        case "missing":
            return InvalidVideoError(
                "reading video files needs PyAV: pip install 'vlmserve[video]', or send a list of frames"
            )
        case "no video":
            return InvalidVideoError("the file has no video, only audio")
        case "no frames":
            return InvalidVideoError("the video is broken: none of its frames could be decoded")
        case "too many frames":
            return VideoTooLargeError(
                f"the video has more than {limits.max_decoded_frames:,} frames (--max-decoded-frames); cut it"
            )
        case "too large":
            return VideoTooLargeError(
                f"the video's frames have {detail.replace(' ', ' x ')} pixels; "
                f"at most {limits.max_frame_pixels:,} are allowed (--max-frame-pixels)"
            )
        case "slow":
            return VideoTooLargeError(
                f"the video takes longer than {limits.video_timeout:g} s to decode (--video-timeout); "
                "send a shorter or smaller one"
            )
        case "memory":
            return VideoTooLargeError(
                f"decoding the video takes more than {limits.video_memory:,} bytes of memory (--video-memory)"
            )
        case "aborted":
            return VideoTooLargeError(
                "the decoder aborted: the video is broken, or takes more than "
                f"{limits.video_memory:,} bytes of memory (--video-memory)"
            )
        case "killed":
            return InvalidVideoError(
                "the process that decoded the video was killed, perhaps for lack of memory; send a smaller video"
            )
        case "crash":
            return InvalidVideoError("the video is broken: the decoder crashed")
    return InvalidVideoError(f"the video is broken: {detail or 'it cannot be decoded'}")
