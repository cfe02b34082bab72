"""What decoding an image may cost: memory beside others, time, and the passes of a progressive JPEG."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator

import numpy as np
from PIL import Image

from vlmserve.cancellation import check_cancelled
from vlmserve.config import MediaConfig
from vlmserve.errors import ImageTooLargeError, InvalidImageError
from vlmserve.media.png import without_metadata

_BYTES_PER_PIXEL = {"JPEG": 12, "MPO": 12}
_MOST_BYTES_PER_PIXEL = 16
"""At the worst moment of decoding, turning and converting, measured: WebP keeps four copies, as does transparency that
becomes white; a progressive JPEG keeps all coefficients."""
_POLL_INTERVAL = 0.1
"""Seconds between checks whether a client that waits for memory is still connected."""
_SMALL_IMAGE, _SMALL_SHARE = 8, 4
"""Divisors of the capacity: the largest image that counts as small, and the share that is reserved for small ones."""
_FREE_SCANS = 16
"""Scans that a JPEG of the largest allowed size may have. Encoders write up to 13; a smaller one may have more."""
_MOST_SCANS = 1000
_MOST_MARKERS = 65536
_SCAN = b"\xff\xda"
_SHORT_READ, _SHORT_READS = 4096, 256
_MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd8\xff])")


class _Lane:
    """Images of one kind, which are decoded in order of arrival."""

    def __init__(self, capacity: int, slots: int) -> None:
        self.capacity = capacity
        self.slots = slots
        self.used = self.running = 0
        self.queue: deque[object] = deque()

    def takes(self, queued: object, num_bytes: int) -> bool:
        """Whether it is an image's turn, and there is room for it."""
        is_next = self.queue[0] is queued and self.running < self.slots
        return is_next and self.used + num_bytes <= self.capacity


class DecodingMemory:
    """Limits the memory of all images that are decoded and resized at once, and how many these are. Thread-safe.

    Images that take at most an eighth of the capacity have a quarter of it to themselves, so that large ones, which
    take seconds, never delay them. slots: threads that may decode at once in each of these two lanes.
    """

    def __init__(self, capacity: int, slots: int = sys.maxsize) -> None:
        self.capacity = capacity
        self._changed = threading.Condition()
        reserved = capacity // _SMALL_SHARE
        self._largest_small = capacity // _SMALL_IMAGE
        self._small = _Lane(reserved, slots)
        self._large = _Lane(capacity - reserved, slots)

    @property
    def used(self) -> int:
        """Bytes that are taken."""
        return self._small.used + self._large.used

    @contextlib.contextmanager
    def share(self, num_bytes: int) -> Iterator[None]:
        """Wait for so many bytes, and give them back at the end. What is larger than all there is waits to be alone.

        Raises CancelledWorkError when nobody waits for the image any more.
        """
        lane = self._small if num_bytes <= self._largest_small else self._large
        num_bytes = min(num_bytes, lane.capacity)
        queued = object()
        with self._changed:
            lane.queue.append(queued)
            try:
                while not lane.takes(queued, num_bytes):
                    self._changed.wait(_POLL_INTERVAL)
                    check_cancelled()
                lane.used += num_bytes
                lane.running += 1
            finally:
                lane.queue.remove(queued)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                lane.used -= num_bytes
                lane.running -= 1
                self._changed.notify_all()


def decoding_bytes(image: Image.Image) -> int:
    """Bytes that it takes to decode an opened image and make it RGB, at most."""
    return image.width * image.height * bytes_per_pixel(image.format)


def bytes_per_pixel(format: str | None) -> int:
    """The same for each pixel of an image in that format."""
    return _BYTES_PER_PIXEL.get(format or "", _MOST_BYTES_PER_PIXEL)


def frame_bytes(num_pixels: int) -> int:
    """The same for a frame of a video file."""
    return num_pixels * _MOST_BYTES_PER_PIXEL


def too_slow(timeout: float) -> InvalidImageError:
    """What is raised for an image that takes more than so many seconds."""
    return InvalidImageError(f"the image takes longer than {timeout:g} s to decode; send a smaller one")


class LimitedFile(io.BytesIO):
    """A file in memory from which Pillow reads an image for as long as that may take and somebody waits for it.

    PNG files are read without their metadata.

    Decoders read in blocks of 64 KiB or less. Reading raises InvalidImageError and CancelledWorkError.
    """

    def __init__(self, data: bytes, timeout: float) -> None:
        super().__init__(without_metadata(data))
        self._timeout = timeout
        self._reads = 0
        self.restart()
        self._check()

    def restart(self) -> None:
        """The time counts from now on."""
        self._deadline = time.monotonic() + self._timeout

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads += 1
        # Headers are read a few bytes at a time, blocks of an image as a whole.
        if size is None or not 0 <= size < _SHORT_READ or self._reads % _SHORT_READS == 0:
            self._check()
        return super().read(size)

    def _check(self) -> None:
        check_cancelled()
        if time.monotonic() > self._deadline:
            raise too_slow(self._timeout)


def check_scans(data: bytes, image: Image.Image, limits: MediaConfig) -> None:
    """Raises ImageTooLargeError for a JPEG with so many scans that decoding it would take far longer than others.

    Each scan of a progressive JPEG is a pass over all its pixels, however few bytes it has. A TIFF file may hold JPEGs,
    one for each strip.
    """
    pieces = 1
    if image.format == "TIFF":
        if image.info.get("compression") not in ("jpeg", "tiff_jpeg"):
            return
        pieces = max(1, len(getattr(image, "tile", ())), _num_strips(image))
    elif image.format not in ("JPEG", "MPO"):
        return
    most = min(_MOST_SCANS, _FREE_SCANS * max(1, limits.max_image_pixels // (image.width * image.height)))
    # An upper bound first, since following the markers takes longer.
    scans = _most_scans(data)
    if scans > most and image.format != "TIFF":
        scans = _num_scans(data, most)
    if scans > most * pieces:
        raise ImageTooLargeError(
            f"the image is a progressive JPEG with more than {most} scans; save it again as an ordinary JPEG"
        )


def _most_scans(data: bytes) -> int:
    """How often two bytes of a file look like the beginning of a scan."""
    array = np.frombuffer(data, np.uint8)
    marks = np.flatnonzero(array[:-1] == _SCAN[0])
    return int(np.count_nonzero(array[marks + 1] == _SCAN[1]))


def _num_strips(image: Image.Image) -> int:
    """Strips or tiles of a TIFF file; each is a JPEG."""
    tags = getattr(image, "tag_v2", {})
    offsets = tags.get(273) or tags.get(324) or ()
    return len(offsets) if isinstance(offsets, tuple) else 1


def _num_scans(data: bytes, most: int) -> int:
    """Scans of a JPEG file up to its end, or more than `most`."""
    scans, at = 0, 2
    for _ in range(_MOST_MARKERS):
        found = _MARKER.search(data, at)
        if found is None or found[1] == b"\xd9":
            return scans
        scans += found[0] == _SCAN
        if scans > most:
            return scans
        at = found.end() + max(2, int.from_bytes(data[found.end() : found.end() + 2], "big"))
    return most + 1
