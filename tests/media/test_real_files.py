"""Images as cameras, phones and programs write them show the right picture, or get a clear error."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from tests.media.images_for_tests import MadeWhenAsked, encoded, noise, orientation_exif
from vlmserve.errors import InvalidImageError
from vlmserve.media.images import decode_image
from vlmserve.media.processor import to_rgb
from vlmserve.settings.config import MediaConfig

LIMITS = MediaConfig()
PICTURE = noise(64, 48)


def gray16() -> Image.Image:
    return Image.fromarray(np.asarray(PICTURE.convert("L")).astype(np.uint16) * 257)


def transparent_palette() -> bytes:
    palette = PICTURE.quantize(255)
    return encoded(palette, transparency=255)


FILES = MadeWhenAsked(
    {
        "CMYK JPEG": lambda: encoded(PICTURE.convert("CMYK"), "JPEG", quality=95),
        "gray JPEG": lambda: encoded(PICTURE.convert("L"), "JPEG", quality=95),
        "progressive JPEG": lambda: encoded(PICTURE, "JPEG", quality=95, progressive=True),
        "JPEG with data after its end": lambda: encoded(PICTURE, "JPEG", quality=95) + bytes(5000),
        "16-bit PNG": lambda: encoded(gray16()),
        "PNG with a palette and transparency": transparent_palette,
        "PNG with gray and alpha": lambda: encoded(PICTURE.convert("LA")),
        "PNG with one bit": lambda: encoded(PICTURE.convert("1")),
        "WebP animation of one frame": lambda: encoded(PICTURE, "WEBP", save_all=True, lossless=True),
        "lossless WebP": lambda: encoded(PICTURE, "WEBP", lossless=True),
        "AVIF": lambda: encoded(PICTURE, "AVIF", quality=95),
        "BMP": lambda: encoded(PICTURE, "BMP"),
        "BMP with a palette": lambda: encoded(PICTURE.quantize(200), "BMP"),
        "BMP with alpha": lambda: encoded(PICTURE.convert("RGBA"), "BMP"),
        "TIFF": lambda: encoded(PICTURE, "TIFF"),
        "CMYK TIFF": lambda: encoded(PICTURE.convert("CMYK"), "TIFF"),
        "16-bit TIFF": lambda: encoded(gray16(), "TIFF"),
        "TIFF with LZW": lambda: encoded(PICTURE, "TIFF", compression="tiff_lzw"),
        "TIFF with a JPEG": lambda: encoded(PICTURE, "TIFF", compression="jpeg", quality=95),
        "GIF": lambda: encoded(PICTURE, "GIF"),
    }
)
_COLOURLESS = ("gray", "16-bit", "one bit")
_COARSE = ("GIF", "palette", "one bit")


@pytest.mark.parametrize("name", FILES)
def test_picture_is_right(name: str) -> None:
    shown = np.asarray(to_rgb(decode_image(FILES[name], LIMITS).image)).astype(int)
    colourless = any(word in name for word in _COLOURLESS)
    expected = np.asarray(PICTURE.convert("L").convert("RGB") if colourless else PICTURE).astype(int)
    assert shown.shape == expected.shape
    if "one bit" in name:
        shown, expected = shown.mean(axis=(0, 1)), expected.mean(axis=(0, 1))
    assert np.abs(shown - expected).mean() < (15 if any(word in name for word in _COARSE) else 6)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", [3, 6, 8])
def test_picture_stands_upright(format: str, orientation: int) -> None:
    data = encoded(PICTURE, format, exif=orientation_exif(orientation), quality=95)
    turns = {3: 180, 6: 270, 8: 90}
    expected = np.asarray(PICTURE.rotate(turns[orientation], expand=True)).astype(int)
    shown = np.asarray(to_rgb(decode_image(data, LIMITS).image)).astype(int)
    assert shown.shape == expected.shape
    assert np.abs(shown - expected).mean() < 8


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'/>", "SVG drawing.*convert it to PNG"),
        (b"<!DOCTYPE html><html>not found</html>", "not an image in a supported format"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "not an image in a supported format"),
    ],
)
def test_other_files_get_clear_errors(data: bytes, message: str) -> None:
    with pytest.raises(InvalidImageError, match=message):
        decode_image(data, LIMITS)


@pytest.mark.parametrize("lost", [1, 2, 20])
def test_jpeg_without_its_last_bytes_is_called_truncated(lost: int) -> None:
    data = encoded(noise(300, 200), "JPEG")
    try:
        shown = decode_image(data[:-lost], LIMITS)
    except InvalidImageError as error:
        assert "truncated" in str(error)  # noqa: PT017
    else:
        whole = np.asarray(decode_image(data, LIMITS).image)
        np.testing.assert_array_equal(np.asarray(shown.image), whole)
