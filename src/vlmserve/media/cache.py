"""A cache of preprocessed images: a repeated image is neither decoded nor resized."""

from __future__ import annotations

import copy
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Protocol

import msgspec

from vlmserve.cancellation import check_cancelled
from vlmserve.errors import InvalidRequestError
from vlmserve.media.decoding import DecodingMemory
from vlmserve.types import ImageInput

_POLL_INTERVAL = 0.1
"""Seconds between checks whether a client that waits for another client's image is still connected."""


class ImageCacheStats(msgspec.Struct, frozen=True):
    num_images: int
    used_bytes: int
    capacity_bytes: int
    hits: int
    """Images found in memory or on disk, or in preparation."""
    misses: int
    """Prepared images."""

    @property
    def queries(self) -> int:
        return self.hits + self.misses


class ImageStore(Protocol):
    """Keeps prepared images for later starts. Thread-safe."""

    def read(self, key: bytes) -> ImageInput | None: ...

    def store(self, key: bytes, image: ImageInput) -> None: ...


class ImageCache:
    """An LRU cache of images and videos, with at most `capacity_bytes` of pixels; 0: no cache. Thread-safe.

    Keys include the preprocessing. decoding: at most `decode_memory` bytes for images in preparation. stored: asked
    before an image is prepared.
    """

    stored: ImageStore | None = None

    def __init__(self, capacity_bytes: int, decode_memory: int = sys.maxsize, decode_slots: int = sys.maxsize) -> None:
        self.decoding = DecodingMemory(decode_memory, decode_slots)
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._images: OrderedDict[bytes, ImageInput] = OrderedDict()
        self._in_flight: dict[bytes, Future[ImageInput]] = {}
        self._used_bytes = self._hits = self._misses = 0

    def get(self, key: bytes, prepare: Callable[[], ImageInput]) -> ImageInput:
        """Waiting threads get a copy of an InvalidRequestError; after other errors they try themselves. Raises as
        `prepare` does."""
        if self._capacity_bytes == 0:
            return self._prepared(key, prepare)
        while True:
            own: Future[ImageInput] = Future()
            try:
                found = self._find_or_claim(key, own)
                if isinstance(found, ImageInput):
                    return found
                if found is own:
                    image = self._prepared(key, prepare)
                    self._keep(key, image)
                    own.set_result(image)
                    return image
            except InvalidRequestError as error:
                # A copy: the request that raises the original adds the image's place to it.
                own.set_exception(copy.copy(error))
                raise
            finally:
                self._release(key, own)
            while True:
                check_cancelled()
                try:
                    failure = found.exception(_POLL_INTERVAL)
                    break
                except TimeoutError:
                    continue
                except CancelledError:
                    return self.get(key, prepare)
            if failure is not None:
                raise copy.copy(failure)
            with self._lock:
                self._hits += 1
            return found.result()

    def stats(self) -> ImageCacheStats:
        with self._lock:
            return ImageCacheStats(len(self._images), self._used_bytes, self._capacity_bytes, self._hits, self._misses)

    def _find_or_claim(self, key: bytes, own: Future[ImageInput]) -> ImageInput | Future[ImageInput]:
        with self._lock:
            image = self._images.get(key)
            if image is not None:
                self._images.move_to_end(key)
                self._hits += 1
                return image
            pending = self._in_flight.setdefault(key, own)
            self._misses += pending is own
            return pending

    def _prepared(self, key: bytes, prepare: Callable[[], ImageInput]) -> ImageInput:
        if self.stored is None:
            return prepare()
        if (image := self.stored.read(key)) is None:
            image = prepare()
            self.stored.store(key, image)
        elif self._capacity_bytes:
            with self._lock:
                self._misses -= 1
                self._hits += 1
        return image

    def _keep(self, key: bytes, image: ImageInput) -> None:
        size = image.pixels.nbytes
        if size > self._capacity_bytes:
            return
        with self._lock:
            while self._used_bytes + size > self._capacity_bytes:
                _, evicted = self._images.popitem(last=False)
                self._used_bytes -= evicted.pixels.nbytes
            self._images[key] = image
            self._used_bytes += size

    def _release(self, key: bytes, own: Future[ImageInput]) -> None:
        with self._lock:
            if self._in_flight.get(key) is own:
                del self._in_flight[key]
        own.cancel()  # no effect after a result or an error
