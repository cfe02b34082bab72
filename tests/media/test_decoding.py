"""What decoding an image may cost."""

from __future__ import annotations

import contextlib
import contextvars
import io
import struct
import threading
import time
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image, JpegImagePlugin

from tests.media.images_for_tests import MadeWhenAsked, encoded, noise
from tests.rendering import rendering
from tests.waiting import wait_until
from vlmserve import cancellation
from vlmserve.errors import CancelledWorkError, ImageTooLargeError, InvalidImageError
from vlmserve.media import jpeg
from vlmserve.media.decoding import DecodingMemory
from vlmserve.media.images import FORMATS, decode_image
from vlmserve.settings.config import MediaConfig

LIMITS = MediaConfig(max_image_pixels=40 * 30)


def with_scans(data: bytes, times: int) -> bytes:
    """A progressive JPEG whose last scan comes so many times more."""
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * times + data[-2:]


def test_jpeg_scans_are_limited_by_image_size() -> None:
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


@pytest.mark.parametrize("format", FORMATS)
def test_decoding_stops_when_nobody_waits_for_it(format: str) -> None:
    event = threading.Event()
    event.set()
    token = cancellation.current.set(event)
    try:
        with pytest.raises(CancelledWorkError):
            decode_image(encoded(noise(40, 30), format), LIMITS)
    finally:
        cancellation.current.reset(token)


def test_decoding_ends_after_its_time() -> None:
    data = encoded(noise(400, 300), "PNG")
    with pytest.raises(InvalidImageError, match="takes longer than"):
        decode_image(data, MediaConfig(decode_timeout=1e-6))


def test_memory_is_granted_in_order_within_the_limit() -> None:
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
            wait_until(lambda: memory.num_waiting > number)  # noqa: B023
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
        wait_until(lambda: memory.num_waiting)
        for _ in range(2):
            stack.enter_context(memory.share(100))
        assert memory.used == 402
        assert waiting.is_alive()
    waiting.join(20)
    assert not waiting.is_alive()


def test_concurrent_decodes_never_exceed_slots() -> None:
    memory, running, most = DecodingMemory(8000, slots=2), [0], [0]
    lock, pair = threading.Lock(), threading.Barrier(2)

    def decode(_: int) -> None:
        with memory.share(1):
            with lock:
                running[0] += 1
                most[0] = max(most[0], running[0])
            pair.wait(60)
            with lock:
                running[0] -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(decode, range(20)))
    assert most == [2]


@pytest.mark.parametrize("isolated", [False, True])
def test_client_with_fewest_running_decodes_goes_next(isolated: bool) -> None:
    memory, over, order = DecodingMemory(800, slots=2), threading.Event(), []

    def decode(name: str) -> None:
        cancellation.client.set(name)
        with memory.share(10, isolated=isolated):
            order.append(name)
            over.wait(20)

    with ThreadPoolExecutor(10) as pool:
        for name in ["many"] * 6 + ["one", "one"]:
            pool.submit(contextvars.Context().run, decode, name)
        wait_until(lambda: len(order) + memory.num_waiting >= 8)
        over.set()
    assert order.index("one") < 4
    assert not isolated or order[:3].count("many") == 2, "one client leaves processes to others"


def test_who_waits_for_memory_may_leave() -> None:
    memory, event = DecodingMemory(100), threading.Event()
    failure: list[BaseException] = []

    def wait() -> None:
        cancellation.current.set(event)
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


def test_client_is_forgotten_after_cancelled_images() -> None:
    memory, event = DecodingMemory(100), threading.Event()

    def wait() -> None:
        cancellation.client.set("leaving")
        cancellation.current.set(event)
        with contextlib.suppress(CancelledWorkError), memory.share(50):
            pass

    def decode(stack: contextlib.ExitStack, name: str) -> None:
        cancellation.client.set(name)
        stack.enter_context(memory.share(30))

    with contextlib.ExitStack() as others, contextlib.ExitStack() as running:
        contextvars.Context().run(decode, others, "staying")
        contextvars.Context().run(decode, running, "leaving")
        thread = threading.Thread(target=wait)
        thread.start()
        wait_until(lambda: memory.num_waiting)
        running.close()
        event.set()
        thread.join(20)
        assert memory.clients == {"staying"}
    assert not memory.clients


def test_pixels_are_those_of_pillow() -> None:
    for format in FORMATS:
        data = encoded(noise(64, 48), format)
        image = decode_image(data, MediaConfig())
        with Image.open(io.BytesIO(data)) as theirs:
            np.testing.assert_array_equal(np.asarray(image.image.convert("RGB")), np.asarray(theirs.convert("RGB")))


def segments(marker: int, content: bytes, count: int) -> bytes:
    """A JPEG with so many of these segments."""
    data = encoded(noise(40, 30), "JPEG")
    return data[:2] + (bytes([0xFF, marker]) + (2 + len(content)).to_bytes(2, "big") + content) * count + data[2:]


def with_chunks(count: int) -> bytes:
    """A PNG with so many empty pieces of its pixels."""
    data = encoded(noise(40, 30))
    at = data.index(b"IDAT") - 4
    return data[:at] + (bytes(4) + b"IDAT" + zlib.crc32(b"IDAT").to_bytes(4, "big")) * count + data[at:]


def with_blocks(count: int) -> bytes:
    """A GIF whose pixels are followed by so many blocks of one byte."""
    return encoded(noise(40, 30).convert("P"), "GIF")[:-2] + b"\1\0" * count + b"\0\x3b"


def with_runs(count: int) -> bytes:
    """A BMP of so many runs of one pixel, which Pillow decodes in Python."""
    runs, colors = b"\1\0" * count + b"\0\1", bytes(1024)
    header = struct.pack("<IiiHHIIiiII", 40, 4000, 2500, 1, 8, 1, len(runs), 0, 0, 256, 0)
    start = 14 + len(header) + len(colors)
    return b"BM" + struct.pack("<IHHI", start + len(runs), 0, 0, start) + header + colors + runs


SLOW = MadeWhenAsked(
    {
        "JPEG of empty segments": lambda: segments(0xE5, b"", 2_000_000),
        "JPEG of comments": lambda: segments(0xFE, b"", 2_000_000),
        "JPEG of EXIF": lambda: segments(0xE1, b"Exif\0\0" + bytes(100), 100_000),
        "JPEG of tables": lambda: segments(0xDB, b"\0" + b"\1" * 64, 250_000),
        "JPEG of scans": lambda: with_scans(encoded(Image.new("RGB", (4000, 3000)), "JPEG", progressive=True), 60),
        "PNG of empty chunks": lambda: with_chunks(1_000_000),
        "GIF of blocks": lambda: with_blocks(4_000_000),
        "BMP of runs": lambda: with_runs(4_000_000),
        "WebP": lambda: encoded(Image.new("RGB", (5000, 5000)), "WEBP", lossless=True, method=0),
        "TIFF of pages": lambda: tiff_pages(20_000),
    }
)


def tiff_pages(count: int) -> bytes:
    """A TIFF whose only page comes so many times."""
    data = bytearray(encoded(noise(40, 30), "TIFF"))
    start = int.from_bytes(data[4:8], "little")
    size = 2 + 12 * int.from_bytes(data[start : start + 2], "little")
    page = bytes(data[start : start + size])
    at = len(data)
    data[4:8] = at.to_bytes(4, "little")
    for number in range(count):
        following = at + (number + 1) * (size + 4) if number + 1 < count else 0
        data += page + following.to_bytes(4, "little")
    return bytes(data)


@pytest.mark.parametrize("name", SLOW)
def test_slow_files_take_the_time_of_another_process(name: str) -> None:
    data = SLOW[name]
    decode_image(encoded(noise(9, 9), "GIF"), MediaConfig())  # the process that forks others runs
    used = time.process_time()
    with contextlib.suppress(InvalidImageError):
        decode_image(data, MediaConfig(decode_timeout=1))
    assert time.process_time() - used < 0.5
    assert not rendering()


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_large_exif_data_is_not_read(format: str) -> None:
    tags = [struct.pack("<HHII", tag, 7, 9000, 0) for tag in range(5000)]
    exif = b"Exif\0\0II*\0\x08\0\0\0" + len(tags).to_bytes(2, "little") + b"".join(tags)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decode_image(encoded(noise(40, 30), format, exif=exif), MediaConfig()).size == (40, 30)


HIDDEN = {
    "in a reserved segment": lambda exif: segments(0xF3, exif, 1),
    "after an early end": lambda exif: b"\xff\xd8\xff\xd9" + exif + segments(0xE0, b"JFIF\0", 1)[2:],
    "before a cut": lambda exif: b"\xff\xd8" + exif + b"\xff\xdb\0",
}


@pytest.mark.parametrize("place", HIDDEN)
def test_hidden_metadata_is_not_read_in_this_process(place: str) -> None:
    content = b"Exif\0\0II*\0\x08\0\0\0" + bytes(6)
    data = HIDDEN[place](b"\xff\xe1" + (2 + len(content)).to_bytes(2, "big") + content)
    assert "exif" in read_by_pillow(data)
    plain = jpeg.without_metadata(data)
    assert plain is None or "exif" not in read_by_pillow(plain)


def read_by_pillow(data: bytes) -> set[str]:
    """Names of the metadata that Pillow reads, even if it rejects the file."""
    image = JpegImagePlugin.JpegImageFile.__new__(JpegImagePlugin.JpegImageFile)
    with contextlib.suppress(SyntaxError):
        JpegImagePlugin.JpegImageFile.__init__(image, io.BytesIO(data))
    return set(map(str, image.info))
