"""Videos for models that take only images: each frame is an image with its own key."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from vlmserve.media.cache import ImageCache
from vlmserve.media.decoding import DecodingMemory
from vlmserve.media.images import DecodedImage
from vlmserve.media.keys import frame_key, video_key
from vlmserve.media.processor import ImageProcessor
from vlmserve.media.sources import ImageSource, Opened, process_image
from vlmserve.media.video_files import VideoFile
from vlmserve.media.videos import open_frames
from vlmserve.settings.config import MediaConfig
from vlmserve.types import ImageInput


@dataclass(frozen=True)
class Frame:
    opened: Opened
    processor: ImageProcessor = field(repr=False)
    """Prepares it; the key includes its fingerprint."""

    def prepare(self, cache: ImageCache) -> ImageInput:
        """Raises InvalidVideoError, VideoTooLargeError, CancelledWorkError, and as `prepare_image` does."""

        def prepare() -> ImageInput:
            with self.opened.decoded(cache.decoding) as image:
                return process_image(self.opened.key, image, self.processor)

        return cache.get(self.opened.key, prepare)


@dataclass(frozen=True)
class FrameSequence:
    frames: Sequence[Frame]
    seconds: Sequence[float]
    """Time of each frame."""
    duration: float


class FrameReader:
    """Reads one file at a time. Close it at the end."""

    def __init__(self, limits: MediaConfig, salt: str = "") -> None:
        self._limits = limits
        self._salt = salt
        self._opened: tuple[bytes, VideoFile] | None = None

    def of_list(self, frames: Sequence[ImageSource], processor: ImageProcessor, fps: float) -> FrameSequence:
        """Raises as `open_frames` does."""
        opened = open_frames(frames, processor, self._limits, self._salt)
        seconds = [index / fps for index in range(len(opened))]
        return FrameSequence([Frame(one, processor) for one in opened], seconds, seconds[-1])

    def of_file(
        self, data: bytes, processor: ImageProcessor, sample: Callable[[int, float], Sequence[int]]
    ) -> FrameSequence:
        """The frames are not yet decoded. Raises as `VideoFile` does.

        sample: chooses frames from their number and the frames per second.
        """
        digest = video_key([data], b"", self._salt)
        file = self._open(data, digest)
        indices = sample(file.num_frames, file.rate)
        frames = []
        for index in indices:
            decoded = partial(self._decoded, data, digest, index)
            frames.append(Frame(Opened(frame_key(digest, index, processor.fingerprint), 0, decoded), processor))
        return FrameSequence(frames, [index / file.rate for index in indices], file.num_frames / file.rate)

    def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened[1].close()

    def _open(self, data: bytes, digest: bytes) -> VideoFile:
        if self._opened is not None and self._opened[0] == digest:
            return self._opened[1]
        self.close()
        file = VideoFile(data, self._limits)
        self._opened = digest, file
        return file

    @contextlib.contextmanager
    def _decoded(self, data: bytes, digest: bytes, index: int, memory: DecodingMemory) -> Iterator[DecodedImage]:
        file = self._open(data, digest)
        try:
            with file.frame(index, memory) as image:
                yield DecodedImage.whole(image)
        except BaseException:
            self.close()  # the process may have ended
            raise
