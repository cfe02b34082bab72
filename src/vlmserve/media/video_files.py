"""Video files to frames, through FFmpeg's libraries (PyAV, the extra ``video``), which are loaded when one comes."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from PIL import Image

from vlmserve.cancellation import check_cancelled
from vlmserve.config import MediaConfig
from vlmserve.errors import InvalidVideoError, VideoTooLargeError
from vlmserve.media.heif import heif_format

CONTAINERS = {"mov": (4, b"ftyp"), "matroska": (0, b"\x1aE\xdf\xa3"), "avi": (8, b"AVI ")}
"""FFmpeg's names of file formats, and where in a file which bytes tell them. It must not guess: some of the formats
that it knows are lists of other files, on this machine or the network, and it would open them."""
_FORMATS = {**CONTAINERS, "gif": (0, b"GIF8")}
"""All that are read as videos: an animation may be a video or a document, as the request says."""
_SAFE = {"protocol_whitelist": "", "format_whitelist": ",".join(_FORMATS)}


@dataclass(frozen=True)
class Sampled:
    """What was taken of a file. indices: of the frames. seconds: when each is shown. rate: how many of those that were
    taken are a second. frames: upright RGB images, decoded as they are asked for. num_pixels: of each frame."""

    indices: Sequence[int]
    seconds: Sequence[float]
    rate: float
    num_pixels: int
    frames: Iterator[Image.Image]


@contextmanager
def sample_file(data: bytes, sample: Callable[[int, float], Sequence[int]], limits: MediaConfig) -> Iterator[Sampled]:
    """Some of the frames of an MP4, MOV, WebM, Matroska, AVI or GIF file.

    sample: which ones, of so many, with so many a second. Raises InvalidVideoError for a file that cannot be read, also
    while frames are asked for, and VideoTooLargeError for too many frames or pixels.
    """
    try:
        import av
    except ImportError as error:
        raise InvalidVideoError(
            "videos are only read as lists of frames here; for files, install vlmserve with the extra [video]"
        ) from error
    container_format = _format_of(data, _FORMATS)
    if container_format is None:
        raise InvalidVideoError("the data is not a video in a supported format (MP4, MOV, WebM, Matroska, AVI, GIF)")
    try:
        with av.open(io.BytesIO(data), format=container_format, options=dict(_SAFE)) as container:
            if not container.streams.video:
                raise InvalidVideoError("the file has no video, only audio")
            stream = container.streams.video[0]
            # As many videos are decoded at once as there are threads for it.
            stream.codec_context.thread_count = 1
            check_frame(stream.width, stream.height, limits)
            count = _count(container, stream, limits)
            rate = float(stream.average_rate or stream.guessed_rate or 0)
            if count == 0 or rate <= 0:
                raise InvalidVideoError(f"the video has {count} frames, {rate:g} a second")
            indices = sample(count, rate)
            container.seek(0)
            frames = _decoded(container, stream, indices, limits)
            seconds = [index / rate for index in indices]
            yield Sampled(indices, seconds, len(indices) / count * rate, stream.width * stream.height, frames)
    except av.error.FFmpegError as error:
        raise InvalidVideoError(f"the video is broken: {error}") from error


def container_of(data: bytes) -> str | None:
    """Which of `CONTAINERS` a file is, by its first bytes."""
    return _format_of(data, CONTAINERS)


def _format_of(data: bytes, formats: Mapping[str, tuple[int, bytes]]) -> str | None:
    if heif_format(data):
        return None
    return next((name for name, (at, mark) in formats.items() if data.startswith(mark, at)), None)


def check_frame(width: int, height: int, limits: MediaConfig) -> None:
    """Raises VideoTooLargeError for frames with more pixels than an image may have."""
    if width * height > limits.max_image_pixels:
        raise VideoTooLargeError(
            f"the video's frames have {width:,} x {height:,} pixels; at most {limits.max_image_pixels:,} are allowed"
        )


def _count(container: Any, stream: Any, limits: MediaConfig) -> int:
    """How many frames a stream has, without decoding any: what its header says may be wrong."""
    count = 0
    for packet in container.demux(stream):
        count += packet.size > 0
        if count > limits.max_decoded_frames:
            raise VideoTooLargeError(f"the video has more than {limits.max_decoded_frames:,} frames")
    return count


def _decoded(container: Any, stream: Any, indices: Sequence[int], limits: MediaConfig) -> Iterator[Image.Image]:
    """The frames with those ascending numbers."""
    wanted = list(indices)[::-1]
    image = None
    for number, frame in enumerate(container.decode(stream)):
        check_cancelled()
        if number < wanted[-1]:
            continue
        check_frame(frame.width, frame.height, limits)
        image = frame.to_image()
        if frame.rotation:
            image = image.rotate(frame.rotation, expand=True)
        while wanted and wanted[-1] == number:
            wanted.pop()
            yield image
        if not wanted:
            return
    if image is None:
        raise InvalidVideoError("the video is broken: none of its frames could be decoded")
    # A packet need not be a frame that is shown.
    yield from [image] * len(wanted)
