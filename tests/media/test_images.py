from __future__ import annotations

import base64
import io
import tracemalloc
from collections.abc import Callable
from typing import get_args
from urllib.parse import quote

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.media.images_for_tests import encoded, exif_rotated, noise, orientation_exif, png_header
from vlmserve.errors import ImageTooLargeError, InvalidImageError
from vlmserve.media.files import is_document, media_type_of
from vlmserve.media.images import FORMATS, decode_data_url, decode_image
from vlmserve.settings.config import MediaConfig
from vlmserve.types import MediaKind

LIMITS = MediaConfig()


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_read(format: str) -> None:
    image = decode_image(encoded(noise(40, 30), format), LIMITS)
    assert image.size == (40, 30)


def test_other_formats_are_not_images() -> None:
    with pytest.raises(InvalidImageError, match="not an image in a supported format"):
        decode_image(encoded(noise(4, 4), "PPM"), LIMITS)


@pytest.mark.parametrize(
    ("format", "message"),
    [
        ("TIFF", "the TIFF file has 3 pages; send it as a part of type"),
        ("GIF", "the GIF file is an animation of 3 frames"),
        ("WEBP", "the WEBP file is an animation of 3 frames"),
        ("PNG", "the PNG file is an animation of 3 frames"),
    ],
)
def test_extra_pages_and_frames_are_not_dropped_silently(format: str, message: str) -> None:
    frames = [noise(40, 30, seed=seed) for seed in range(3)]
    data = encoded(frames[0], format, save_all=True, append_images=frames[1:])
    with pytest.raises(InvalidImageError, match=message):
        decode_image(data, LIMITS)


def test_smaller_version_of_a_page_is_no_page() -> None:
    page, thumbnail = noise(40, 30), noise(20, 15)
    thumbnail.encoderinfo = {"tiffinfo": {254: 1}}
    data = encoded(page, "TIFF", save_all=True, append_images=[thumbnail])
    with Image.open(io.BytesIO(data)) as written:
        written.seek(1)
        assert written.tag_v2[254] == 1
    assert decode_image(data, LIMITS).image.tobytes() == page.tobytes()


def test_broken_extra_page_is_no_page() -> None:
    page = noise(40, 30)
    data = bytearray(encoded(page, "TIFF"))
    start = int.from_bytes(data[4:8], "little")
    following = start + 2 + 12 * int.from_bytes(data[start : start + 2], "little")
    data[following : following + 4] = (len(data) - 3).to_bytes(4, "little")
    assert decode_image(bytes(data), LIMITS).image.tobytes() == page.tobytes()


def test_first_picture_of_a_phone_jpeg_counts() -> None:
    image = noise(40, 30)
    options = {"save_all": True, "append_images": [Image.new("RGB", (40, 30), "blue")], "quality": 95}
    data = encoded(image, "MPO", **options)
    shown = np.asarray(decode_image(data, LIMITS).image).astype(int)
    assert np.abs(shown - np.asarray(image)).mean() < 4
    assert media_type_of(data, LIMITS) == "image/jpeg"
    assert not is_document(data, LIMITS)
    turned = encoded(image, "MPO", **options, exif=orientation_exif(6))
    assert decode_image(turned, LIMITS).size == (30, 40)


def test_images_are_turned_upright() -> None:
    assert decode_image(exif_rotated(40, 20, 6), LIMITS).size == (20, 40)


def test_broken_exif_data_does_not_hide_an_image() -> None:
    data = encoded(noise(40, 20), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff broken")
    assert decode_image(data, LIMITS).size == (40, 20)


def test_an_empty_file_is_refused() -> None:
    with pytest.raises(InvalidImageError, match="empty"):
        decode_image(b"", LIMITS)


@pytest.mark.parametrize("data", [b"this is a text file called image.png", b"<svg/>", b"%PDF-1.4", b"\0" * 100])
def test_what_is_no_image_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidImageError, match="not an image"):
        decode_image(data, LIMITS)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("share", [0.02, 0.3, 0.7, 0.95])
def test_a_truncated_image_is_refused(format: str, share: float) -> None:
    data = encoded(noise(120, 90), format)
    with pytest.raises(InvalidImageError, match=r"truncated|broken"):
        decode_image(data[: int(len(data) * share)], LIMITS)


@pytest.mark.parametrize("format", ["PNG", "JPEG"])
def test_an_image_cut_in_half_is_called_truncated(format: str) -> None:
    data = encoded(noise(120, 90), format)
    with pytest.raises(InvalidImageError, match="truncated"):
        decode_image(data[: len(data) // 2], LIMITS)


@settings(max_examples=150, deadline=None)
@given(format=st.sampled_from(FORMATS), position=st.floats(0, 1), garbage=st.binary(min_size=1, max_size=12))
def test_garbage_in_files_is_decoded_or_rejected(format: str, position: float, garbage: bytes) -> None:
    data = bytearray(encoded(noise(24, 18), format))
    start = int(position * (len(data) - 1))
    data[start : start + len(garbage)] = garbage
    try:
        decode_image(bytes(data), LIMITS)
    except (InvalidImageError, ImageTooLargeError):
        return


@pytest.mark.parametrize(("width", "height"), [(30_000, 30_000), (10_000, 10_000), (2**31 - 1, 2**31 - 1)])
def test_a_bomb_is_refused_from_its_header(width: int, height: int) -> None:
    tracemalloc.start()
    with pytest.raises(ImageTooLargeError, match="pixels"):
        decode_image(png_header(width, height), LIMITS)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5_000_000


def test_operator_may_exceed_pillows_pixel_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert decode_image(encoded(noise(40, 30)), MediaConfig(max_image_pixels=1200)).size == (40, 30)
    with pytest.raises(ImageTooLargeError, match="1,199"):
        decode_image(encoded(noise(40, 30)), MediaConfig(max_image_pixels=1199))


def test_a_file_over_the_limit_is_refused() -> None:
    data = encoded(noise(40, 30))
    assert decode_image(data, MediaConfig(max_image_bytes=len(data))).size == (40, 30)
    with pytest.raises(ImageTooLargeError, match="bytes"):
        decode_image(data, MediaConfig(max_image_bytes=len(data) - 1))


def _data_url(data: bytes, header: str = "data:image/png;base64,") -> str:
    return header + base64.b64encode(data).decode()


@pytest.mark.parametrize(
    "header",
    ["data:image/png;base64,", "data:;base64,", "DATA:IMAGE/JPEG;BASE64,", "data:image/png;charset=utf-8;base64,"],
)
def test_data_urls_are_decoded(header: str) -> None:
    data = encoded(noise(5, 4))
    assert decode_data_url(_data_url(data, header), LIMITS) == data


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png;base64", "malformed"),
        ("data:image/png,%89PNG", "not base64"),
        ("data:image/png;base64,AAAA!!!!", "valid base64"),
        ("data:image/png;base64,A", "valid base64"),
        ("data:image/png;base64,AAA%", "valid base64"),
        ("data:image/png;base64,AAA%zz", "valid base64"),
        ("data:image/png;base64,AAAA%80%80%80%80", "valid base64"),
        ("data:a;base64,data:a;base64,data:a;base64,AAAA", "valid base64"),
        ("data:image/png;base64,AA==AAAA", "valid base64"),
        ("data:image/png;base64,AAA===", "valid base64"),
        ("data:image/png;base64,AAAé", "valid base64"),
        ("data:image/png;base64,AAA\ud800", "valid base64"),
        ("data:image/png;base64,AAAA=AAA", "valid base64"),
        ("data:image/png;base64,日本", "valid base64"),
    ],
)
def test_malformed_data_urls_are_refused(url: str, message: str) -> None:
    with pytest.raises(InvalidImageError, match=message):
        decode_data_url(url, LIMITS)


def wrapped(text: str) -> str:
    return "\r\n".join(text[at : at + 20] for at in range(0, len(text), 20)) + "\r\n"


FORMS: dict[str, Callable[[str], str]] = {
    "line breaks": lambda text: wrapped(text).replace("\r", ""),
    "CRLF": wrapped,
    "blanks": lambda text: f" {text[:7]} {text[7:]}\t",
    "no padding": lambda text: text.rstrip("="),
    "URL-safe": lambda text: text.replace("+", "-").replace("/", "_"),
    "URL-safe without padding": lambda text: text.replace("+", "-").replace("/", "_").rstrip("="),
    "percent-encoded": lambda text: quote(text, safe=""),
    "percent-encoded line breaks": lambda text: quote(wrapped(text), safe=""),
    "a data URL inside": lambda text: f"data:image/jpeg;base64,{text}",
    "a wrapped data URL inside": lambda text: f"data:image/jpeg;base64,{wrapped(text)}",
}
"""Base64 as real clients write it."""


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_base64_is_decoded_forgivingly(form: Callable[[str], str]) -> None:
    for size in range(251, 256):
        data = bytes(range(size, 0, -1))
        text = base64.b64encode(data).decode()
        assert decode_data_url("data:image/png;base64," + form(text), LIMITS) == data
        with pytest.raises(ImageTooLargeError, match=f"{size} bytes; at most {size - 1}"):
            decode_data_url("data:image/png;base64," + form(text), MediaConfig(max_image_bytes=size - 1))
        assert decode_data_url("data:;base64," + form(text), MediaConfig(max_image_bytes=size)) == data


@pytest.mark.parametrize(
    "media_type",
    ["text/plain", "binary/octet-stream", "application/x-pdf", "video/mp4", "text/html", "*/*"],
)
def test_content_decides_and_not_the_media_type(media_type: str) -> None:
    data = encoded(noise(5, 4))
    for kind in get_args(MediaKind):
        assert decode_data_url(_data_url(data, f"data:{media_type};base64,"), LIMITS, kind) == data


@given(data=st.binary(max_size=20))
def test_data_url_limit_applies_to_its_content(data: bytes) -> None:
    assert decode_data_url(_data_url(data), MediaConfig(max_image_bytes=len(data))) == data
    if data:
        with pytest.raises(ImageTooLargeError):
            decode_data_url(_data_url(data), MediaConfig(max_image_bytes=len(data) - 1))


def test_pixels_survive_the_way_through_a_data_url() -> None:
    image = noise(17, 11)
    decoded = decode_image(decode_data_url(_data_url(encoded(image)), LIMITS), LIMITS)
    np.testing.assert_array_equal(np.asarray(decoded.image), np.asarray(image))
