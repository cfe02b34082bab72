"""Videos for models that take only images: each frame is an image with a key of its own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from PIL import Image

from vlmserve.config import MediaConfig
from vlmserve.media.cache import ImageCache
from vlmserve.media.decoding import DecodingMemory, frame_bytes
from vlmserve.media.images import DecodedImage
from vlmserve.media.keys import frame_key, video_key
from vlmserve.media.processor import ImageProcessor
from vlmserve.media.sources import ImageSource, Opened, process_image
from vlmserve.media.video_files import sample_file
from vlmserve.media.videos import open_frames
from vlmserve.types import ImageInput


@dataclass(frozen=True)
class Frame:
    """A frame of a video as an image. processor: that prepares it, and whose fingerprint is part of its key."""

    opened: Opened
    processor: ImageProcessor = field(repr=False)

    def prepare(self, cache: ImageCache) -> ImageInput:
        """The frame ready for the vision tower; those in `cache` are not decoded again. Raises InvalidVideoError,
        VideoTooLargeError, CancelledWorkError, and as `prepare_image` does."""

        def prepare() -> ImageInput:
            with self.opened.decoded(cache.decoding) as image:
                return process_image(self.opened.key, image, self.processor)

        return cache.get(self.opened.key, prepare)


@dataclass(frozen=True)
class FrameSequence:
    """Frames of a video. seconds: when each is shown. duration: of the video, in seconds."""

    frames: Sequence[Frame]
    seconds: Sequence[float]
    duration: float


class FrameReader:
    """Reads the frames of the videos of one request, one file at a time. Close it at the end."""

    def __init__(self, limits: MediaConfig, salt: str = "") -> None:
        self._limits = limits
        self._salt = salt
        self._file: _File | None = None

    def of_list(self, frames: Sequence[ImageSource], processor: ImageProcessor, fps: float) -> FrameSequence:
        """A video of which every frame is an image, `fps` a second. Raises as `open_frames` does."""
        opened = open_frames(frames, processor, self._limits, self._salt)
        seconds = [index / fps for index in range(len(opened))]
        return FrameSequence([Frame(one, processor) for one in opened], seconds, seconds[-1])

    def of_file(
        self, data: bytes, processor: ImageProcessor, sample: Callable[[int, float], Sequence[int]]
    ) -> FrameSequence:
        """Frames of a file, none of which is decoded yet. sample: as `sample_file` takes it. Raises as that does."""
        duration = 0.0

        def choose(count: int, rate: float) -> Sequence[int]:
            nonlocal duration
            duration = count / rate
            return sample(count, rate)

        with sample_file(data, choose, self._limits) as sampled:
            indices, seconds = tuple(sampled.indices), sampled.seconds
        digest = video_key([data], b"", self._salt)
        frames = []
        for place, index in enumerate(indices):
            decoded = partial(self._decoded, data, digest, indices, place)
            frames.append(Frame(Opened(frame_key(digest, index, processor.fingerprint), 0, decoded), processor))
        return FrameSequence(frames, seconds, duration)

    def close(self) -> None:
        """Let go of the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    @contextlib.contextmanager
    def _decoded(
        self, data: bytes, digest: bytes, indices: tuple[int, ...], place: int, memory: DecodingMemory
    ) -> Iterator[DecodedImage]:
        file = self._file
        if file is None or file.holds != (digest, indices) or file.place > place:
            self.close()
            file = self._file = _File(data, digest, indices, self._limits)
        with memory.share(frame_bytes(file.num_pixels)):
            try:
                image = file.frame(place)
            except BaseException:
                self._file = None
                raise
            yield DecodedImage.whole(image)


class _File:
    """An open file, whose frames at `indices` are decoded in order. place: of the next one among these."""

    def __init__(self, data: bytes, digest: bytes, indices: tuple[int, ...], limits: MediaConfig) -> None:
        self.holds = digest, indices
        self.place = 0
        self._stack = contextlib.ExitStack()
        sampled = self._stack.enter_context(sample_file(data, lambda *_: indices, limits))
        self.num_pixels, self._frames = sampled.num_pixels, sampled.frames

    def frame(self, place: int) -> Image.Image:
        """A frame that has not been passed yet. What the decoder raises becomes the error of `sample_file`."""
        try:
            for _ in range(place - self.place):
                next(self._frames)
            image = next(self._frames)
        except BaseException:
            self._stack.__exit__(*sys.exc_info())
            raise
        self.place = place + 1
        return image

    def close(self) -> None:
        self._stack.close()
