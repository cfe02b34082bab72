"""The image cache: bounded, least recently used first out, one preparation for all who wait, no errors kept."""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.media.images_for_tests import encoded, exif_rotated, noise
from vlmserve.errors import ImageTooLargeError, InvalidImageError
from vlmserve.media import sources
from vlmserve.media.cache import ImageCache
from vlmserve.media.processor import FixedSizeProcessor
from vlmserve.media.sources import prepare_image
from vlmserve.settings.config import MediaConfig
from vlmserve.types import ImageInput

LIMITS = MediaConfig()
PROCESSOR = FixedSizeProcessor(
    {"model_type": "llava", "vision_config": {"image_size": 28, "patch_size": 14}},
    {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
)
IMAGE_BYTES = 3 * 28 * 28
DATA = encoded(noise(40, 30))


def image_of(key: int, floats: int) -> ImageInput:
    return ImageInput(bytes([key]) * 32, np.full(floats, key, np.float32), 1)


@given(
    capacity=st.integers(0, 10),
    asked=st.lists(st.integers(0, 6), max_size=40),
    sizes=st.lists(st.integers(1, 5), min_size=7, max_size=7),
)
def test_least_recent_entries_go_within_the_byte_limit(capacity: int, asked: list[int], sizes: list[int]) -> None:
    cache = ImageCache(4 * capacity)
    kept: OrderedDict[int, int] = OrderedDict()
    hits = 0
    for key in asked:
        made: list[ImageInput] = []

        def make(key: int = key, made: list[ImageInput] = made) -> ImageInput:
            made.append(image_of(key, sizes[key]))
            return made[0]

        image = cache.get(bytes([key]) * 32, make)
        assert image.pixels.tolist() == [key] * sizes[key]
        assert bool(made) == (key not in kept)
        hits += not made
        kept[key] = sizes[key]
        kept.move_to_end(key)
        if sizes[key] > capacity:
            del kept[key]
        while sum(kept.values()) > capacity:
            kept.popitem(last=False)
        stats = cache.stats()
        assert stats.used_bytes == 4 * sum(kept.values()) <= stats.capacity_bytes == 4 * capacity
        assert stats.num_images == len(kept)
    assert (stats := cache.stats()).hits == hits
    assert stats.misses == (len(asked) - hits if capacity else 0)


class Gate:
    """Counts how often an image is processed, and holds processing up until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Semaphore(0)
        self.open = threading.Event()
        self.count = 0
        self.failure: Exception | None = None
        original = sources.decode_opened

        def decode(*args: object) -> object:
            self.count += 1
            self.begun.release()
            assert self.open.wait(60)
            if self.failure is not None:
                raise self.failure
            return original(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(sources, "decode_opened", decode)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Released by every thread that begins to wait for another one's image."""
    semaphore = threading.Semaphore(0)
    wait = Future.exception

    def exception(future: Future[object], timeout: float | None = None) -> BaseException | None:
        semaphore.release()
        return wait(future, timeout)

    monkeypatch.setattr("vlmserve.media.cache.Future.exception", exception)
    return semaphore


def in_threads(
    count: int, prepare: Callable[[], ImageInput], gate: Gate, waiting: threading.Semaphore
) -> list[Future[ImageInput]]:
    """Outcomes of threads that all ask before the first one gets through."""
    with ThreadPoolExecutor(count) as pool:
        outcomes = [pool.submit(prepare) for _ in range(count)]
        assert gate.begun.acquire(timeout=60)
        for _ in range(count - 1):
            assert waiting.acquire(timeout=60)
        gate.open.set()
    return outcomes


def test_concurrent_threads_prepare_an_image_once(gate: Gate, waiting: threading.Semaphore) -> None:
    cache = ImageCache(10 * IMAGE_BYTES)
    outcomes = in_threads(6, lambda: prepare_image(bytes(DATA), PROCESSOR, LIMITS, cache), gate, waiting)
    assert len({id(outcome.result().pixels) for outcome in outcomes}) == 1
    assert gate.count == 1
    stats = cache.stats()
    assert (stats.num_images, stats.used_bytes, stats.hits, stats.misses) == (1, IMAGE_BYTES, 5, 1)


def test_waiting_threads_get_an_oversized_image_too(gate: Gate, waiting: threading.Semaphore) -> None:
    cache = ImageCache(IMAGE_BYTES - 1)
    outcomes = in_threads(3, lambda: prepare_image(DATA, PROCESSOR, LIMITS, cache), gate, waiting)
    assert len({id(outcome.result().pixels) for outcome in outcomes}) == 1
    assert (cache.stats().num_images, cache.stats().used_bytes) == (0, 0)


def test_failed_image_fails_each_waiter_and_is_retried(gate: Gate, waiting: threading.Semaphore) -> None:
    cache = ImageCache(10 * IMAGE_BYTES)
    gate.failure = InvalidImageError("the image is broken")
    params = iter("abcd")
    found: list[str | None] = []

    def prepare() -> ImageInput:
        try:
            return prepare_image(DATA, PROCESSOR, LIMITS, cache)
        except InvalidImageError as error:
            found.append(error.param)
            error.param = next(params)
            raise

    errors = [outcome.exception() for outcome in in_threads(4, prepare, gate, waiting)]
    assert gate.count == 1
    assert [(type(error), str(error)) for error in errors] == [(InvalidImageError, "the image is broken")] * 4
    assert found == [None] * 4
    assert {error.param for error in errors if isinstance(error, InvalidImageError)} == set("abcd")
    gate.failure = None
    assert prepare_image(DATA, PROCESSOR, LIMITS, cache).num_tokens
    assert gate.count == 2
    assert cache.stats().num_images == 1


def test_interrupted_thread_leaves_the_image_to_waiters(gate: Gate, waiting: threading.Semaphore) -> None:
    cache = ImageCache(10 * IMAGE_BYTES)
    gate.failure = MemoryError()
    outcomes = in_threads(3, lambda: prepare_image(DATA, PROCESSOR, LIMITS, cache), gate, waiting)
    assert all(isinstance(outcome.exception(), MemoryError) for outcome in outcomes)
    assert gate.count == 3
    gate.failure = None
    assert prepare_image(DATA, PROCESSOR, LIMITS, cache).num_tokens


def test_a_known_image_is_neither_decoded_nor_processed(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ImageCache(10 * IMAGE_BYTES)
    opened = noise(40, 30)
    first = [prepare_image(source, PROCESSOR, LIMITS, cache) for source in (DATA, opened)]
    monkeypatch.setattr(sources, "decode_opened", None)
    monkeypatch.setattr(FixedSizeProcessor, "process", None)
    again = [prepare_image(source, PROCESSOR, LIMITS, cache) for source in (bytes(bytearray(DATA)), opened.copy())]
    assert [image.pixels is known.pixels for image, known in zip(again, first, strict=True)] == [True, True]


@pytest.mark.parametrize("capacity", [0, 10 * IMAGE_BYTES])
def test_shared_pixels_are_read_only(capacity: int) -> None:
    image = prepare_image(DATA, PROCESSOR, LIMITS, ImageCache(capacity))
    with pytest.raises(ValueError, match="read-only"):
        image.pixels[0, 0, 0, 0] = 0


def test_mutated_pixel_changes_key_and_pixels() -> None:
    cache = ImageCache(10 * IMAGE_BYTES)
    image = noise(28, 28)
    mutated = image.copy()
    red, green, blue = image.getpixel((3, 5))
    mutated.putpixel((3, 5), (red ^ 1, green, blue))
    for one, other in ((image, mutated), (encoded(image), encoded(mutated))):
        before, after = (prepare_image(source, PROCESSOR, LIMITS, cache) for source in (one, other))
        assert before.key != after.key
        assert np.argwhere(before.pixels != after.pixels).tolist() == [[0, 0, 5, 3]]
    assert cache.stats().hits == 0


def test_changed_image_object_is_read_again() -> None:
    cache = ImageCache(10 * IMAGE_BYTES)
    image = noise(28, 28)
    before = prepare_image(image, PROCESSOR, LIMITS, cache)
    image.paste((1, 2, 3), (0, 0, 28, 28))
    after = prepare_image(image, PROCESSOR, LIMITS, cache)
    assert before.key != after.key
    assert not np.array_equal(before.pixels, after.pixels)


def test_opened_file_may_serve_many_threads() -> None:
    data = exif_rotated(600, 400, 8)
    expected = prepare_image(Image.open(io.BytesIO(data)), PROCESSOR, LIMITS, ImageCache(0))
    for _ in range(5):
        opened = Image.open(io.BytesIO(data))
        barrier = threading.Barrier(8)

        def prepare(_: int, opened: Image.Image = opened, barrier: threading.Barrier = barrier) -> ImageInput:
            barrier.wait(60)
            return prepare_image(opened, PROCESSOR, LIMITS, ImageCache(0))

        with ThreadPoolExecutor(8) as pool:
            for image in pool.map(prepare, range(8)):
                assert image.key == expected.key
                np.testing.assert_array_equal(image.pixels, expected.pixels)


def test_salts_share_no_images() -> None:
    cache = ImageCache(10 * IMAGE_BYTES)
    images = [prepare_image(DATA, PROCESSOR, LIMITS, cache, salt=salt) for salt in ("", "a", "b", "a")]
    assert len({image.key for image in images}) == 3
    assert (cache.stats().hits, cache.stats().misses) == (1, 3)
    decoded = [prepare_image(noise(9, 9), PROCESSOR, LIMITS, cache, salt=salt) for salt in ("", "a", "b", "a")]
    assert len({image.key for image in decoded}) == 3


def test_oversized_file_is_rejected_before_lookup() -> None:
    cache = ImageCache(10 * IMAGE_BYTES)
    for _ in range(2):
        with pytest.raises(ImageTooLargeError):
            prepare_image(DATA, PROCESSOR, MediaConfig(max_image_bytes=len(DATA) - 1), cache)
    assert cache.stats().misses == 0


def test_tiny_cache_keeps_images_of_threads_apart() -> None:
    files = [encoded(noise(30, 20, seed=seed)) for seed in range(6)]
    alone = [prepare_image(data, PROCESSOR, LIMITS, ImageCache(0)) for data in files]
    cache = ImageCache(2 * IMAGE_BYTES)
    order = np.random.default_rng(0).integers(0, len(files), 300).tolist()
    with ThreadPoolExecutor(6) as pool:
        images = list(pool.map(lambda index: prepare_image(files[index], PROCESSOR, LIMITS, cache), order))
    for index, image in zip(order, images, strict=True):
        assert image.key == alone[index].key
        np.testing.assert_array_equal(image.pixels, alone[index].pixels)
    stats = cache.stats()
    assert stats.used_bytes <= stats.capacity_bytes
    assert stats.hits + stats.misses == len(order)
