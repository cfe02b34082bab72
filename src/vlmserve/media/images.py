"""Opens and decodes images. Rejects images above a limit before decoding."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from PIL import Image, UnidentifiedImageError

from vlmserve.errors import (
    ImageTooLargeError,
    InvalidImageError,
    VLMServeError,
)
from vlmserve.media import jpeg, png
from vlmserve.media.base64_text import decoded_base64, plain_base64
from vlmserve.media.decoding import LimitedFile
from vlmserve.media.exif import orientation_exif, orientation_in
from vlmserve.media.image_process import ImageProcess, heif_format
from vlmserve.media.kinds import KINDS, check_num_bytes, max_bytes
from vlmserve.media.pages import check_single
from vlmserve.settings.config import MediaConfig
from vlmserve.types import MediaKind

FORMATS: tuple[str, ...] = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_HERE = ("PNG", "JPEG", "WEBP")
"""Formats that this process decodes, which is faster: their decoders' time and memory depend only on the pixels."""
_ISOLATED = {
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"II+\0": "TIFF",
    b"MM\0+": "TIFF",
}
_SIGNATURES = {png.SIGNATURE: "PNG", jpeg.SIGNATURE: "JPEG", b"RIFF": "WebP", **_ISOLATED}
_LARGE_WEBP = 4_000_000
"""Pixels. Pillow holds the GIL while it decodes WebP, so a larger image would block all other threads for long."""
_HEAD = 1024
"""Bytes in which to search for signatures of other formats."""
_ORIENTATION = 0x0112
_SHARPNESS = 2.0
"""Minimum pixels of a JPEG, decoded at a fraction of its size, per pixel in the result."""
_DATA_URL = re.compile(r"data:([^,;]*)((?:;[^,;]*)*),", re.IGNORECASE)


class _Transform(NamedTuple):
    """swaps: width and height. mirrors_x, mirrors_y: after swapping."""

    method: Image.Transpose
    swaps: bool
    mirrors_x: bool
    mirrors_y: bool


_TRANSFORMS = {
    2: _Transform(Image.Transpose.FLIP_LEFT_RIGHT, False, True, False),
    3: _Transform(Image.Transpose.ROTATE_180, False, True, True),
    4: _Transform(Image.Transpose.FLIP_TOP_BOTTOM, False, False, True),
    5: _Transform(Image.Transpose.TRANSPOSE, True, False, False),
    6: _Transform(Image.Transpose.ROTATE_270, True, True, False),
    7: _Transform(Image.Transpose.TRANSVERSE, True, True, True),
    8: _Transform(Image.Transpose.ROTATE_90, True, False, True),
}
"""Rotates an image upright, by EXIF orientation."""

Box: TypeAlias = tuple[float, float, float, float]
"""Left, upper, right and lower edge in pixels."""


@dataclass(frozen=True, slots=True)
class DecodedImage:
    image: Image.Image
    """At full size, or at a half, a quarter or an eighth."""
    size: tuple[int, int]
    """Full width and height."""
    box: Box
    """The image's area in `image`. If its fraction is not an integer, the last column or row is only partly inside."""

    @classmethod
    def whole(cls, image: Image.Image) -> DecodedImage:
        return cls(image, image.size, (0, 0, *image.size))

    @property
    def is_reduced(self) -> bool:
        return self.box != (0, 0, *self.size)


def decode_image(
    data: bytes, limits: MediaConfig, reduction: Callable[[tuple[int, int]], float] | None = None
) -> DecodedImage:
    """Decode a PNG, JPEG, WebP, GIF, BMP, TIFF, AVIF or HEIC file and rotate it upright.

    reduction: from width and height, the ratio to the wanted pixels; a JPEG with a large ratio is decoded faster, at a
    fraction of its size. None: decode every pixel.

    Raises ImageTooLargeError, before decoding, for too many bytes, pixels or scans; InvalidImageError for data that is
    empty, broken, truncated, no image, paged, animated or slow to decode; CancelledWorkError.
    """
    return decode_opened(open_header(data, limits), limits, reduction)


def decode_opened(
    image: Image.Image, limits: MediaConfig, reduction: Callable[[tuple[int, int]], float] | None = None
) -> DecodedImage:
    size = image.size
    box = (0, 0, *size) if reduction is None else _draft(image, reduction)
    load_image(image, limits)
    return _upright(DecodedImage(image, size, box))


def open_header(data: bytes, limits: MediaConfig) -> Image.Image:
    """Read only the header. Raises as `decode_image` does."""
    image = open_any(data, limits)
    try:
        check_single(image)
    except BaseException:
        image.close()
        raise
    return image


def open_any(data: bytes, limits: MediaConfig) -> Image.Image:
    """Open any number of pages or frames; read only the header."""
    check_num_bytes(len(data), limits)
    if not data:
        raise InvalidImageError("the image is empty (0 bytes)")
    return open_file(data, limits)


def open_file(data: bytes, limits: MediaConfig) -> Image.Image:
    image = _opened(lambda: _open(data, limits), data, limits)
    try:
        check_num_pixels(image, limits)
        num_pixels = image.width * image.height
        is_slow = image.format == "WEBP" and num_pixels > _LARGE_WEBP
        is_slow = is_slow or (image.format == "JPEG" and jpeg.has_many_scans(data, num_pixels, limits))
    except BaseException:
        image.close()
        raise
    return in_process(image, data, limits) if is_slow else image


def in_process(image: Image.Image, data: bytes, limits: MediaConfig) -> Image.Image:
    """Reopen in an isolated process, unless it is in one. Raises as `decode_image` does."""
    if isinstance(image, ImageProcess):
        return image
    image.close()
    format, num_pixels = image.format or "", image.width * image.height
    return _opened(lambda: ImageProcess(data, format, limits, num_pixels), data, limits)


def _open(data: bytes, limits: MediaConfig) -> Image.Image:
    isolated = heif_format(data) or next((name for mark, name in _ISOLATED.items() if data.startswith(mark)), None)
    if isolated is not None:
        return ImageProcess(data, isolated, limits)
    plain: bytes | None = data
    if data.startswith(png.SIGNATURE):
        plain = png.without_metadata(data)
    elif data.startswith(jpeg.SIGNATURE):
        plain = jpeg.without_metadata(data)
    if plain is None:
        return ImageProcess(data, "PNG" if data.startswith(png.SIGNATURE) else "JPEG", limits)
    if Image.MAX_IMAGE_PIXELS is not None and limits.max_image_pixels > Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = limits.max_image_pixels  # raises Pillow's own, earlier limit
    image = Image.open(LimitedFile(plain, limits.decode_timeout), formats=_HERE)
    if image.format == "WEBP":
        image.info["exif"] = orientation_exif(orientation_in(image.info.get("exif", b""), image.info.get("xmp", b"")))
    return image


def _opened(open: Callable[[], Image.Image], data: bytes, limits: MediaConfig) -> Image.Image:
    try:
        return open()
    except VLMServeError:
        raise
    except UnidentifiedImageError as error:
        raise InvalidImageError(_unreadable(data)) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageTooLargeError(f"the image has more than {limits.max_image_pixels:,} pixels") from error
    except Exception as error:  # Pillow raises anything on broken headers
        raise InvalidImageError(f"the image is broken: {error}") from error


def load_image(image: Image.Image, limits: MediaConfig) -> None:
    check_num_pixels(image, limits)
    if isinstance(file := getattr(image, "fp", None), LimitedFile):
        file.restart()
    _checked(image.load)


def decode_process(image: ImageProcess) -> None:
    """`load_image` then reads the pixels. Raises as `decode_image` does."""
    _checked(image.decode)


def _checked(decode: Callable[[], object]) -> None:
    try:
        decode()
    except VLMServeError:
        raise
    except Exception as error:  # Pillow raises anything on broken data
        kind = "truncated" if "truncated" in str(error).lower() else "broken"
        raise InvalidImageError(f"the image is {kind}: {error}") from error


def upright(image: Image.Image) -> DecodedImage:
    return _upright(DecodedImage.whole(image))


def check_num_pixels(image: Image.Image, limits: MediaConfig) -> None:
    width, height = image.size
    if width * height > limits.max_image_pixels:
        raise ImageTooLargeError(
            f"the image has {width:,} x {height:,} pixels; at most {limits.max_image_pixels:,} are allowed"
        )
    if width == 0 or height == 0:
        raise InvalidImageError(f"the image has no pixels ({width} x {height})")


def orientation(image: Image.Image) -> int:
    try:
        found = image.getexif().get(_ORIENTATION)
    except Exception:  # broken EXIF data has no orientation
        return 1
    return found if found in _TRANSFORMS else 1


def _draft(image: Image.Image, reduction: Callable[[tuple[int, int]], float]) -> Box:
    """Prepare to decode a JPEG at a fraction of its size, if `reduction` allows. Returns its box."""
    width, height = image.size
    transform = _TRANSFORMS.get(orientation(image))
    spare = reduction((height, width) if transform is not None and transform.swaps else (width, height)) / _SHARPNESS
    divisor = next((divisor for divisor in (8, 4, 2) if divisor <= spare), 1)
    draft = image.draft(None, (width // divisor, height // divisor)) if divisor > 1 else None
    return (0, 0, width, height) if draft is None else draft[1]


def _upright(decoded: DecodedImage) -> DecodedImage:
    transform = _TRANSFORMS.get(orientation(decoded.image))
    if transform is None:
        return decoded
    (width, height), (_, _, right, lower) = decoded.size, decoded.box
    image = decoded.image.transpose(transform.method)
    if transform.swaps:
        width, height, right, lower = height, width, lower, right
    left = image.width - right if transform.mirrors_x else 0
    upper = image.height - lower if transform.mirrors_y else 0
    return DecodedImage(image, (width, height), (left, upper, left + right, upper + lower))


def decode_data_url(url: str, limits: MediaConfig, kind: MediaKind = "image") -> bytes:
    """The content of ``data:image/png;base64,…`` tells the type, not the media type.

    A data URL may contain another one, as clients write it into fields for base64. Raises the kind's error
    (InvalidImageError) for other text, its size error (ImageTooLargeError) above the limit.
    """
    invalid, _, example = KINDS[kind]
    encoded = url
    for _ in range(2):
        encoded = encoded[_header_end(encoded, kind) :]
        if encoded[:5].lower() != "data:":
            break
    if _num_decoded(encoded) > max_bytes(limits, kind):
        with contextlib.suppress(ValueError):
            check_num_bytes(_num_decoded(plain_base64(encoded)), limits, kind)
    try:
        return decoded_base64(encoded)
    except ValueError:
        raise invalid(f"the data URL is not valid base64; write {example};base64, and the encoded {kind}") from None


def _header_end(url: str, kind: MediaKind) -> int:
    """Start of the base64 text. Raises the kind's error if there is none."""
    invalid, _, example = KINDS[kind]
    header = _DATA_URL.match(url[:256])
    if header is None:
        raise invalid(f"the data URL is malformed; write {example};base64, and the encoded {kind}")
    if "base64" not in (parameter.strip() for parameter in header[2].lower().split(";")):
        raise invalid(f"the data URL is not base64-encoded; write {example};base64, and the {kind}")
    return header.end()


def _num_decoded(encoded: str | bytes) -> int:
    padding = "=" if isinstance(encoded, str) else b"="
    return len(encoded) * 3 // 4 - encoded[-2:].count(padding)  # type: ignore[arg-type]


def _unreadable(data: bytes) -> str:
    if b"%PDF-" in data[:_HEAD]:
        return 'the data is a PDF document, not an image; send it as a part of type "file"'
    if b"<svg" in data[:_HEAD]:
        return "the data is an SVG drawing, not an image of pixels; convert it to PNG"
    if heif_format(data):
        return f"the image is truncated or broken: it begins like AVIF or HEIC, but cannot be read ({len(data)} bytes)"
    for signature, name in _SIGNATURES.items():
        if data.startswith(signature):
            return f"the image is truncated or broken: it begins like {name}, but cannot be read ({len(data)} bytes)"
    return f"the data is not an image in a supported format ({', '.join(FORMATS)}, AVIF, HEIC)"
