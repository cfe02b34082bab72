"""Bytes to pictures, refusing what is too large before it is decoded."""

from __future__ import annotations

import io
import re

import msgspec
from PIL import Image, ImageOps, UnidentifiedImageError

from vlmserve.config import MediaConfig
from vlmserve.errors import ImageTooLargeError, InvalidImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_SIGNATURES = {
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"\xff\xd8\xff": "JPEG",
    b"RIFF": "WebP",
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
}
_DATA_URL = re.compile(r"data:([^,;]*)((?:;[^,;]*)*),", re.IGNORECASE)


def decode_picture(data: bytes, limits: MediaConfig) -> Image.Image:
    """The picture in a PNG, JPEG, WebP, GIF (first frame), BMP or TIFF file, upright as its EXIF orientation says.

    Raises InvalidImageError if `data` is empty, broken, truncated or no picture, ImageTooLargeError if it has more
    bytes or pixels than allowed; the number of pixels is read from the header, before anything is decoded.
    """
    check_num_bytes(len(data), limits)
    if not data:
        raise InvalidImageError("the picture is empty (0 bytes)")
    if Image.MAX_IMAGE_PIXELS is not None and limits.max_image_pixels > Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = limits.max_image_pixels  # Pillow's own limit, which it checks before ours
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise InvalidImageError(_unreadable(data)) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageTooLargeError(f"the picture has more than {limits.max_image_pixels:,} pixels") from error
    except Exception as error:  # Pillow's readers raise anything on broken headers
        raise InvalidImageError(f"the picture is broken: {error}") from error
    load_picture(image, limits)
    return upright(image)


def load_picture(image: Image.Image, limits: MediaConfig) -> None:
    """Decode an opened picture. Raises as `decode_picture` does."""
    width, height = image.size
    if width * height > limits.max_image_pixels:
        raise ImageTooLargeError(
            f"the picture has {width:,} x {height:,} pixels; at most {limits.max_image_pixels:,} are allowed"
        )
    if width == 0 or height == 0:
        raise InvalidImageError(f"the picture has no pixels ({width} x {height})")
    try:
        image.load()
    except Exception as error:  # Pillow's decoders raise anything on broken data
        kind = "truncated" if "truncated" in str(error).lower() else "broken"
        raise InvalidImageError(f"the picture is {kind}: {error}") from error


def upright(image: Image.Image) -> Image.Image:
    """A decoded picture, turned as its EXIF orientation says."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # broken EXIF data says nothing about how the picture stands
        return image


def decode_data_url(url: str, limits: MediaConfig) -> bytes:
    """The bytes in ``data:image/png;base64,…``.

    Raises InvalidImageError unless it is strict base64 of a picture type, ImageTooLargeError over the limit.
    """
    header = _DATA_URL.match(url[:256])
    if header is None:
        raise InvalidImageError("the data URL is malformed; write data:image/png;base64, and the encoded picture")
    media_type, parameters = header[1].strip().lower(), header[2].lower().split(";")
    if "base64" not in (parameter.strip() for parameter in parameters):
        raise InvalidImageError("the data URL is not base64-encoded; write data:image/png;base64, and the picture")
    if media_type and not media_type.startswith("image/") and media_type != "application/octet-stream":
        raise InvalidImageError(f"the data URL holds {media_type}, not a picture")
    encoded = url[header.end() :]
    check_num_bytes(len(encoded) * 3 // 4 - encoded[-2:].count("="), limits)
    try:
        # As strict as binascii and several times as fast, which counts: no other thread runs meanwhile.
        return msgspec.convert(encoded, bytes)
    except (msgspec.ValidationError, UnicodeEncodeError):
        raise InvalidImageError("the data URL is not valid base64") from None


def check_num_bytes(size: int, limits: MediaConfig) -> None:
    """Raises ImageTooLargeError if a file of `size` bytes is over the limit."""
    if size > limits.max_image_bytes:
        raise ImageTooLargeError(
            f"the picture's file has {size:,} bytes; at most {limits.max_image_bytes:,} are allowed"
        )


def _unreadable(data: bytes) -> str:
    for signature, name in _SIGNATURES.items():
        if data.startswith(signature):
            return f"the picture is truncated or broken: it begins like {name}, but cannot be read ({len(data)} bytes)"
    return f"the data is not a picture in a supported format ({', '.join(FORMATS)})"
