"""What decoding an image may cost."""

from __future__ import annotations

import contextlib
import io
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from tests.media.images_for_tests import encoded, noise
from vlmserve import cancellation
from vlmserve.config import MediaConfig
from vlmserve.errors import CancelledWorkError, ImageTooLargeError, InvalidImageError
from vlmserve.media.decoding import DecodingMemory
from vlmserve.media.images import FORMATS, decode_image

LIMITS = MediaConfig(max_image_pixels=40 * 30)


def with_scans(data: bytes, times: int) -> bytes:
    """A progressive JPEG whose last scan comes so many times more."""
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * times + data[-2:]


def test_scans_of_a_jpeg_are_counted_and_bounded_by_its_size() -> None:
    honest = encoded(noise(40, 30), "JPEG", progressive=True, quality=95)
    assert decode_image(honest, LIMITS).size == (40, 30)
    with pytest.raises(ImageTooLargeError, match="scans"):
        decode_image(with_scans(honest, 20), LIMITS)
    # A small image may have more, since each costs less.
    decode_image(with_scans(honest, 20), MediaConfig())
    with pytest.raises(ImageTooLargeError, match="scans"):
        decode_image(with_scans(honest, 2000), MediaConfig())


def test_what_only_looks_like_scans_is_none() -> None:
    honest = encoded(noise(40, 30), "JPEG", progressive=True)
    comment = b"\xff\xfe" + (2 + 2 * 2000).to_bytes(2, "big") + b"\xff\xda" * 2000
    inside, behind = honest[:2] + comment + honest[2:], honest + b"\xff\xda" * 2000
    expected = np.asarray(decode_image(honest, LIMITS).image)
    for data in (inside, behind):
        np.testing.assert_array_equal(np.asarray(decode_image(data, LIMITS).image), expected)


def test_scans_of_a_jpeg_in_a_tiff_file_are_bounded_too() -> None:
    honest = encoded(noise(40, 30), "TIFF", compression="jpeg")
    assert decode_image(honest, LIMITS).size == (40, 30)
    with pytest.raises(ImageTooLargeError, match="scans"):
        decode_image(honest + b"\xff\xda" * 100, LIMITS)


@pytest.mark.parametrize("format", FORMATS)
def test_decoding_stops_when_nobody_waits_for_it(format: str) -> None:
    event = threading.Event()
    event.set()
    token = cancellation._cancelled.set(event)
    try:
        with pytest.raises(CancelledWorkError):
            decode_image(encoded(noise(40, 30), format), LIMITS)
    finally:
        cancellation._cancelled.reset(token)


def test_decoding_ends_after_its_time() -> None:
    data = encoded(noise(400, 300), "PNG")
    with pytest.raises(InvalidImageError, match="takes longer than"):
        decode_image(data, MediaConfig(decode_timeout=1e-6))


def test_memory_is_shared_in_order_of_arrival_and_never_exceeded() -> None:
    memory = DecodingMemory(100)
    order: list[int] = []
    most = 0
    lock = threading.Lock()

    def take(number: int, size: int) -> None:
        nonlocal most
        with memory.share(size):
            with lock:
                order.append(number)
                most = max(most, memory.used)
            time.sleep(0.02)

    with memory.share(60):
        threads = []
        for number, size in enumerate((500, 30, 30, 50)):
            threads.append(threading.Thread(target=take, args=(number, size)))
            threads[-1].start()
            while len(memory._large.queue) <= number:
                time.sleep(0.001)
        assert order == []  # what is larger than all there is waits to be alone, and the others behind it
    for thread in threads:
        thread.join(20)
    assert order[0] == 0
    assert sorted(order) == [0, 1, 2, 3]
    assert most <= 100
    assert memory.used == 0


def test_small_images_never_wait_for_large_ones() -> None:
    memory = DecodingMemory(800, slots=2)
    with contextlib.ExitStack() as stack:
        for size in (101, 101):
            stack.enter_context(memory.share(size))
        waiting = threading.Thread(target=lambda: contextlib.ExitStack().enter_context(memory.share(800)), daemon=True)
        waiting.start()
        while not memory._large.queue:
            time.sleep(0.001)
        for _ in range(2):
            stack.enter_context(memory.share(100))
        assert memory.used == 402
        assert waiting.is_alive()
    waiting.join(20)
    assert not waiting.is_alive()


def test_no_more_images_are_decoded_at_once_than_slots() -> None:
    memory, running, most = DecodingMemory(8000, slots=2), [0], [0]
    lock = threading.Lock()

    def decode(_: int) -> None:
        with memory.share(1):
            with lock:
                running[0] += 1
                most[0] = max(most[0], running[0])
            time.sleep(0.01)
            with lock:
                running[0] -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(decode, range(20)))
    assert most == [2]


def test_who_waits_for_memory_may_leave() -> None:
    memory, event = DecodingMemory(100), threading.Event()
    failure: list[BaseException] = []

    def wait() -> None:
        cancellation._cancelled.set(event)
        try:
            with memory.share(50):
                pass
        except CancelledWorkError as error:
            failure.append(error)

    with memory.share(60):
        thread = threading.Thread(target=wait)
        thread.start()
        event.set()
        thread.join(20)
        assert failure
    with memory.share(100):
        assert memory.used == 75, "a quarter is reserved for small images"


def test_pixels_are_those_of_pillow() -> None:
    for format in FORMATS:
        data = encoded(noise(64, 48), format)
        image = decode_image(data, MediaConfig())
        with Image.open(io.BytesIO(data)) as theirs:
            np.testing.assert_array_equal(np.asarray(image.image.convert("RGB")), np.asarray(theirs.convert("RGB")))
