"""Limits memory and time of image decoding."""

from __future__ import annotations

import contextlib
import io
import itertools
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator

from PIL import Image

from vlmserve.cancellation import check_cancelled, client
from vlmserve.errors import InvalidImageError

_BYTES_PER_PIXEL = {"JPEG": 12}
_MOST_BYTES_PER_PIXEL = 16
"""Measured peaks of decoding, rotating and converting: WebP and transparency take four copies, a progressive JPEG keeps
all coefficients."""
_POLL_INTERVAL = 0.1
"""Seconds between checks whether a client that waits for memory is still connected."""
_SMALL_IMAGE, _SMALL_SHARE = 8, 4
"""Divisors of the capacity: size limit of small images, and the share reserved for them."""
_SHORT_READ, _SHORT_READS = 4096, 256


class _Waiting:
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.client = client.get()


class _Lane:
    """A queue. The client with the fewest running images is next, then the client that waited longest."""

    def __init__(self, capacity: int, slots: int, per_client: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.queue: list[_Waiting] = []
        self._slots = slots
        self._per_client = per_client
        self._running: Counter[str] = Counter()
        self.last_turn: dict[str, int] = {}
        self._turns = itertools.count(1)

    def takes(self, image: _Waiting) -> bool:
        return (
            self._running.total() < self._slots
            and self.used + image.num_bytes <= self.capacity
            and self._running[image.client] < self._per_client
            and image is min(self.queue, key=self._order)
        )

    def _order(self, image: _Waiting) -> tuple[int, int]:
        return self._running[image.client], self.last_turn.get(image.client, 0)

    def begin(self, image: _Waiting) -> None:
        self.used += image.num_bytes
        self._running[image.client] += 1
        self.last_turn[image.client] = next(self._turns)

    def end(self, image: _Waiting) -> None:
        self.used -= image.num_bytes
        self._running[image.client] -= 1
        self._running += Counter()  # drops clients without images
        self._forget_idle(image.client)

    def leave(self, image: _Waiting) -> None:
        self.queue.remove(image)
        self._forget_idle(image.client)

    def _forget_idle(self, name: str) -> None:
        if not self._running[name] and all(other.client != name for other in self.queue):
            self.last_turn.pop(name, None)


class DecodingMemory:
    """Limits memory and number of images in decoding. Thread-safe.

    Images of up to an eighth of the capacity share a quarter of it, so large images, which take seconds, never delay
    them. Other processes share as much additional memory as large images. slots: threads in each lane; twice as many
    processes, at most half of them for one client.
    """

    def __init__(self, capacity: int, slots: int = sys.maxsize) -> None:
        self.capacity = capacity
        self._changed = threading.Condition()
        reserved = capacity // _SMALL_SHARE
        self._largest_small = capacity // _SMALL_IMAGE
        self._small = _Lane(reserved, slots, slots)
        self._large = _Lane(capacity - reserved, slots, slots)
        self._isolated = _Lane(capacity - reserved, 2 * slots, slots)

    @property
    def _lanes(self) -> tuple[_Lane, ...]:
        return self._small, self._large, self._isolated

    @property
    def used(self) -> int:
        return sum(lane.used for lane in self._lanes)

    @property
    def num_waiting(self) -> int:
        return sum(len(lane.queue) for lane in self._lanes)

    @property
    def clients(self) -> set[str]:
        return {name for lane in self._lanes for name in lane.last_turn}

    @contextlib.contextmanager
    def share(self, num_bytes: int, *, isolated: bool = False) -> Iterator[None]:
        """Take memory for the block. An image above the capacity waits to be alone.

        isolated: another process decodes the image. Raises CancelledWorkError when nobody waits for it.
        """
        lane = self._isolated if isolated else self._small if num_bytes <= self._largest_small else self._large
        image = _Waiting(min(num_bytes, lane.capacity))
        with self._changed:
            lane.queue.append(image)
            try:
                while not lane.takes(image):
                    self._changed.wait(_POLL_INTERVAL)
                    check_cancelled()
                lane.begin(image)
            finally:
                lane.leave(image)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                lane.end(image)
                self._changed.notify_all()


def decoding_bytes(image: Image.Image) -> int:
    return image.width * image.height * bytes_per_pixel(image.format)


def bytes_per_pixel(format: str | None) -> int:
    return _BYTES_PER_PIXEL.get(format or "", _MOST_BYTES_PER_PIXEL)


def frame_bytes(num_pixels: int) -> int:
    return num_pixels * _MOST_BYTES_PER_PIXEL


def too_slow(timeout: float) -> InvalidImageError:
    return InvalidImageError(
        f"the image takes longer than {timeout:g} s to decode (--decode-timeout); send a smaller one"
    )


class LimitedFile(io.BytesIO):
    """A file in memory for Pillow. Reading raises InvalidImageError after a timeout, or CancelledWorkError.

    Decoders read blocks of 64 KiB or less.
    """

    def __init__(self, data: bytes, timeout: float) -> None:
        super().__init__(data)
        self._timeout = timeout
        self._reads = 0
        self.restart()
        self._check()

    def restart(self) -> None:
        self._deadline = time.monotonic() + self._timeout

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads += 1
        # Headers are read a few bytes at a time, image data in blocks.
        if size is None or not 0 <= size < _SHORT_READ or self._reads % _SHORT_READS == 0:
            self._check()
        return super().read(size)

    def _check(self) -> None:
        check_cancelled()
        if time.monotonic() > self._deadline:
            raise too_slow(self._timeout)
