"""HEIC and AVIF images are decoded in processes of their own, with the pixels that libheif and Pillow give."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pillow_heif
import psutil
import pytest
from PIL import Image, UnidentifiedImageError

from tests.media.images_for_tests import MadeWhenAsked, encoded, noise, orientation_exif
from tests.rendering import captured, fork_servers, rendering, without_module
from tests.waiting import wait_until
from vlmserve import cancellation
from vlmserve.errors import CancelledWorkError, ImageTooLargeError, InvalidImageError
from vlmserve.media import fork_server, image_process, isolated
from vlmserve.media.decoding import DecodingMemory
from vlmserve.media.files import is_document, media_type_of
from vlmserve.media.image_process import ImageProcess
from vlmserve.media.images import decode_image
from vlmserve.media.paged_images import PagedImage
from vlmserve.media.processor import to_rgb
from vlmserve.settings.config import MediaConfig

LIMITS = MediaConfig()


def heic(image: Image.Image | pillow_heif.HeifFile, **options: Any) -> bytes:
    file = io.BytesIO()
    heif = pillow_heif.from_pillow(image) if isinstance(image, Image.Image) else image
    heif.save(file, format="HEIF", **options)
    return file.getvalue()


def deep(mode: str, channels: int) -> bytes:
    """Of 10 bits."""
    levels = np.random.default_rng(1).integers(0, 65536, (48, 64, channels), dtype=np.uint16)
    return heic(pillow_heif.from_bytes(mode, (64, 48), levels.tobytes()), quality=90)


def several(format: str) -> bytes:
    """Three images; of the HEIC file, the last is shown first."""
    images = [noise(64, 48, seed=seed) for seed in range(3)]
    if format == "AVIF":
        return encoded(images[0], "AVIF", save_all=True, append_images=images[1:])
    file = pillow_heif.from_pillow(images[0])
    for image in images[1:]:
        file.add_from_pillow(image)
    return heic(file, save_all=True, primary_index=2)


FILES = MadeWhenAsked(
    {
        "plain": lambda: heic(noise(64, 48), quality=90),
        "odd size": lambda: heic(noise(67, 45), quality=90),
        "wide": lambda: heic(noise(700, 300), quality=50),
        "gray": lambda: heic(noise(64, 48, "L")),
        "alpha": lambda: heic(noise(64, 48, "RGBA")),
        "premultiplied alpha": lambda: heic(noise(64, 48, "RGBA").convert("RGBa")),
        "gray with alpha": lambda: heic(noise(64, 48, "LA")),
        "10 bits": lambda: deep("RGB;16", 3),
        "10 bits with alpha": lambda: deep("RGBA;16", 4),
        "10 bits gray": lambda: deep("L;16", 1),
        "without chroma subsampling": lambda: heic(noise(64, 48), chroma=444),
        "colour profile": lambda: heic(noise(64, 48), icc_profile=b"a profile that nobody reads"),
        "AVIF": lambda: encoded(noise(64, 48), "AVIF"),
        "AVIF with alpha": lambda: encoded(noise(64, 48, "RGBA"), "AVIF"),
        "AVIF gray": lambda: encoded(noise(64, 48, "L"), "AVIF"),
        **{
            f"turned {number}": lambda number=number: heic(noise(64, 48), exif=orientation_exif(number).tobytes())
            for number in range(1, 9)
        },
        **{
            f"AVIF turned {number}": lambda number=number: encoded(noise(64, 48), "AVIF", exif=orientation_exif(number))
            for number in range(1, 9)
        },
    }
)


def opened_here(data: bytes) -> Image.Image:
    """The image as Pillow opens it in this process."""
    if data[8:12] == b"avif" or data[8:12] == b"avis":
        return Image.open(io.BytesIO(data), formats=("AVIF",))
    return pillow_heif.HeifImageFile(io.BytesIO(data))


def upright_here(image: Image.Image) -> Image.Image:
    image.load()
    turned = {
        2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }.get(image.getexif().get(0x0112, 1))  # fmt: skip
    return image if turned is None else image.transpose(turned)


@pytest.mark.parametrize("name", FILES)
def test_pixels_are_those_of_the_libraries(name: str) -> None:
    expected = upright_here(opened_here(FILES[name]))
    decoded = decode_image(FILES[name], LIMITS)
    assert decoded.size == expected.size
    assert decoded.image.mode == expected.mode
    assert decoded.image.tobytes() == expected.tobytes()
    assert to_rgb(decoded.image).tobytes() == to_rgb(expected).tobytes()
    assert not rendering()


@pytest.mark.parametrize("format", ["HEIF", "AVIF"])
def test_several_images_in_a_file_are_pages(format: str) -> None:
    data = several(format)
    expected = opened_here(data)
    assert expected.n_frames == 3
    with pytest.raises(InvalidImageError, match=r"HEIC file has 3 images|AVIF file is an animation of 3 frames"):
        decode_image(data, LIMITS)
    assert media_type_of(data, LIMITS) == f"image/{format.lower()}"
    assert is_document(data, LIMITS)
    assert not rendering()
    pages, memory = PagedImage(data, LIMITS), DecodingMemory(2**24)
    for number in (1, 0, 2, 0):
        expected.seek(number)
        with pages.decoded(number, memory) as page:
            np.testing.assert_array_equal(np.asarray(page.image), np.asarray(expected))
    pages.close()
    assert not rendering()


def test_the_image_that_a_file_names_comes_first() -> None:
    image = ImageProcess(several("HEIF"), "HEIF", LIMITS)
    expected = opened_here(several("HEIF"))
    assert image.tell() == expected.tell() == 2
    np.testing.assert_array_equal(np.asarray(image), np.asarray(expected))
    with pytest.raises(EOFError):
        image.seek(3)
    image.close()


def error_here(data: bytes) -> str:
    """The message for what the libraries raise in this process."""
    try:
        image = opened_here(data)
    except (UnidentifiedImageError, SyntaxError, IndexError, TypeError):
        return f"it begins like AVIF or HEIC, but cannot be read ({len(data)} bytes)"
    except Exception as error:
        return f"the image is broken: {error}"
    try:
        image.load()
    except Exception as error:
        kind = "truncated" if "truncated" in str(error).lower() else "broken"
        return f"the image is {kind}: {error}"
    return "shown"


@pytest.mark.parametrize("name", ["plain", "alpha", "10 bits", "AVIF", "AVIF with alpha"])
def test_broken_files_get_the_errors_of_the_libraries(name: str) -> None:
    good = FILES[name]
    chance = np.random.default_rng(3)
    files = [good[:end] for end in range(16, len(good), max(1, len(good) // 12))]
    for _ in range(12):
        garbled = bytearray(good)
        for place in chance.integers(12, len(good), 4):
            garbled[place] = chance.integers(256)
        files.append(bytes(garbled))
    outcomes = set()
    for data in files:
        expected = error_here(data)
        outcomes.add(expected == "shown")
        if expected == "shown":
            assert decode_image(data, LIMITS).size == (64, 48)
        else:
            with pytest.raises(InvalidImageError, match=re.escape(expected[:300].strip())):
                decode_image(data, LIMITS)
    assert False in outcomes
    assert not rendering()
    assert decode_image(good, LIMITS).size == (64, 48)


@pytest.mark.parametrize("name", ["plain", "AVIF"])
def test_size_is_checked_before_anything_is_decoded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageProcess, "load", None)
    with pytest.raises(ImageTooLargeError, match="64 x 48 pixels; at most 3,071"):
        decode_image(FILES[name], MediaConfig(max_image_pixels=64 * 48 - 1))
    with pytest.raises(ImageTooLargeError, match="bytes"):
        decode_image(FILES[name], MediaConfig(max_image_bytes=100))


def test_hanging_decoder_is_ended_and_the_next_works(monkeypatch: pytest.MonkeyPatch) -> None:
    header = '{"images": 1, "width": 64, "height": 48, "mode": "RGB"}\n'
    with captured(monkeypatch) as answer_with:
        for answer in ("", header):  # while the header is read, and while the image is decoded
            answer_with(answer)
            with pytest.raises(InvalidImageError, match=r"takes longer than 0\.5 s to decode"):
                decode_image(FILES["plain"], MediaConfig(decode_timeout=0.5))
            assert not rendering()
    assert decode_image(FILES["plain"], LIMITS).size == (64, 48)


def test_a_decoder_that_hangs_delays_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    other = fork_server.ForkServer("image")
    with captured(monkeypatch), ThreadPoolExecutor(1) as threads:
        event = threading.Event()

        def decode() -> None:
            token = cancellation.current.set(event)
            try:
                decode_image(FILES["plain"], MediaConfig(decode_timeout=600))
            finally:
                cancellation.current.reset(token)

        hanging = threads.submit(decode)
        wait_until(rendering)
        with monkeypatch.context() as patch:
            patch.setattr(isolated, "fork_for", lambda kind, stdin, stdout, setup: (other, other.fork(stdin, stdout)))
            assert decode_image(FILES["plain"], LIMITS).size == (64, 48)
        assert not hanging.done()
        event.set()
        with pytest.raises(CancelledWorkError):
            hanging.result(timeout=60)
        assert not rendering()
    other.close()


def test_what_a_captured_process_answers_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    header = '{"images": 1, "width": 64, "height": 48, "mode": "RGB"}\n'
    answers = [
        "nonsense\n",
        "x" * 10_000,
        '{"images": 1, "width": -64, "height": 48, "mode": "RGB"}\n',
        '{"images": 1, "width": 0, "height": 48, "mode": "RGB"}\n',
        '{"images": 1, "width": 64, "height": 48, "mode": "P"}\n',
        '{"images": 0, "width": 64, "height": 48, "mode": "RGB"}\n',
        '{"images": 1000000000000, "width": 64, "height": 48, "mode": "RGB"}\n',
        '{"images": 1, "width": 64, "height": 48, "mode": "RGB", "orientation": 99999999}\n',
        header + '{"width": 100000, "height": 100000, "mode": "RGB"}\n',
        header + '{"width": 64, "height": 48, "mode": "RGB", "stride": 192}\nshort',
        header + '{"width": 64, "height": 48, "mode": "RGB", "stride": 10}\n',
        header + '{"width": 64, "height": 48, "mode": "RGB", "stride": 1000000000}\n',
        '{"error": "broken", "detail": "\\u0007\\n"}\n',
        '{"error": "anything else", "detail": ""}\n',
    ]
    with captured(monkeypatch) as answer_with:
        for answer in answers:
            answer_with(answer)
            with pytest.raises(InvalidImageError):
                decode_image(FILES["plain"], MediaConfig(decode_timeout=1))
    assert not rendering()


def test_a_decoder_that_crashes_is_about_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    image = ImageProcess(FILES["wide"], "HEIF", LIMITS)
    os.kill(image.process.pid, signal.SIGSEGV)
    with pytest.raises(InvalidImageError, match="broken: it crashed the process"):
        image.load()
    assert not rendering()
    assert decode_image(FILES["plain"], LIMITS).size == (64, 48)


def test_a_fork_server_that_was_ended_is_replaced() -> None:
    fork_server.end_servers()
    decode_image(FILES["plain"], LIMITS)
    (before,) = fork_servers()
    before.kill()
    before.wait()
    assert decode_image(FILES["plain"], LIMITS).size == (64, 48)
    (after,) = fork_servers()
    assert after.pid != before.pid


def test_images_share_a_server_and_no_process() -> None:
    decode_image(FILES["plain"], LIMITS)
    servers = {server.pid for server in fork_servers()}
    images = [ImageProcess(FILES["plain"], "HEIF", LIMITS), ImageProcess(FILES["AVIF"], "AVIF", LIMITS)]
    assert len({image.process.pid for image in images}) == 2
    with ThreadPoolExecutor(4) as threads:
        sizes = list(threads.map(lambda _: decode_image(FILES["plain"], LIMITS).size, range(12)))
    assert sizes == [(64, 48)] * 12
    assert {server.pid for server in fork_servers()} == servers
    del images  # nobody closes them: they end when the next is decoded
    decode_image(FILES["plain"], LIMITS)
    wait_until(lambda: not rendering())


def test_decoder_process_has_no_secrets_but_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMSERVE_API_KEY", "secret")
    fork_server.end_servers()
    image = ImageProcess(FILES["plain"], "HEIF", LIMITS)
    worker = psutil.Process(image.process.pid)
    assert "VLMSERVE_API_KEY" not in worker.environ()
    if sys.platform == "linux":
        assert worker.rlimit(psutil.RLIMIT_FSIZE) == (0, 0)
        assert worker.rlimit(psutil.RLIMIT_CPU)[0] < 1000
        assert worker.rlimit(psutil.RLIMIT_AS)[0] < worker.memory_info().vms + 512 * 1024**2
        assert len(os.listdir(f"/proc/{worker.pid}/fd")) == 5  # three for nothing, and two pipes
    image.close()
    assert not rendering()


def test_without_libheif_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    with without_module(monkeypatch, "pillow_heif"):
        with pytest.raises(InvalidImageError, match=r"pip install 'vlmserve\[heif\]'"):
            decode_image(FILES["plain"], LIMITS)
        assert decode_image(FILES["AVIF"], LIMITS).size == (64, 48)


def test_a_cancelled_image_ends_its_process() -> None:
    event = threading.Event()
    token = cancellation.current.set(event)
    try:
        image = ImageProcess(FILES["wide"], "HEIF", LIMITS)
        event.set()
        with pytest.raises(CancelledWorkError):
            image.load()
    finally:
        cancellation.current.reset(token)
    assert not rendering()


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGKILL, "was killed, perhaps for lack of memory"),
        (signal.SIGXCPU, "takes longer than 30 s"),
        (signal.SIGABRT, "aborted: the image is broken, or takes more than its pixels and 256 MiB"),
        (signal.SIGSEGV, "crashed the process"),
    ],
)
def test_ended_process_says_what_ended_it(number: int, message: str) -> None:
    image = ImageProcess(encoded(noise(64, 48), "GIF"), "GIF", LIMITS)
    os.kill(image.process.pid, number)
    with pytest.raises((InvalidImageError, ImageTooLargeError), match=message):
        image.load()
    assert not rendering()


LARGE = MadeWhenAsked(
    {
        "GIF": lambda: encoded(Image.new("L", (6000, 4000)), "GIF"),
        "TIFF": lambda: encoded(Image.new("RGB", (6000, 4000)), "TIFF", compression="tiff_lzw"),
        "WEBP": lambda: encoded(Image.new("RGB", (6000, 4000)), "WEBP", method=0),
        "AVIF": lambda: encoded(Image.new("RGB", (6000, 4000)), "AVIF", speed=10),
        "HEIF": lambda: heic(Image.new("RGB", (4000, 3600)), quality=30, enc_params={"preset": "ultrafast"}),
    }
)


@pytest.mark.parametrize("format", LARGE)
def test_lack_of_memory_is_named(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = LARGE[format]
    monkeypatch.setattr(image_process, "MEMORY_BYTES", 40 * 1024**2)
    monkeypatch.setattr(image_process, "bytes_per_pixel", lambda format: 0)
    with pytest.raises(ImageTooLargeError, match="takes more than its pixels and 40 MiB of memory, the limit"):
        decode_image(data, LIMITS)
    assert not rendering()


@pytest.mark.parametrize("format", LARGE)
def test_broken_file_is_not_blamed_on_memory(format: str) -> None:
    data = LARGE[format]
    with pytest.raises(InvalidImageError):
        decode_image(data[: len(data) * 2 // 3], LIMITS)


def test_broken_page_is_not_blamed_on_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first page takes more memory than the second one may."""
    monkeypatch.setattr(image_process, "MEMORY_BYTES", 40 * 1024**2)
    data = bytearray(encoded(Image.new("P", (6000, 4000)), "TIFF", save_all=True, append_images=[noise(200, 200)]))
    at = data.rindex(noise(200, 200).tobytes()[:64])
    del data[at + 1000 :]
    image = ImageProcess(bytes(data), "TIFF", LIMITS)
    image.load()
    image.seek(1)
    with pytest.raises(OSError, match=r"truncated|decode"):
        image.load()
    image.close()
