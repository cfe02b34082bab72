"""Bytes to images, refusing what is too large before it is decoded."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from PIL import Image, UnidentifiedImageError

from vlmserve.config import MediaConfig
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
from vlmserve.types import MediaKind

FORMATS: tuple[str, ...] = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_HERE = ("PNG", "JPEG", "WEBP")
"""Formats whose ordinary files are decoded in this process, which is faster: they bound time and memory by pixels."""
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
"""Pixels. Pillow decodes WebP without releasing the GIL, so larger ones would stop all other threads for long."""
_HEAD = 1024
"""Bytes in which a file that is no image says what it is."""
_ORIENTATION = 0x0112
"""EXIF tag of how the camera was held."""
_SHARPNESS = 2.0
"""A JPEG is only decoded at a fraction of its size that leaves this many pixels for each one that is asked for."""
_DATA_URL = re.compile(r"data:([^,;]*)((?:;[^,;]*)*),", re.IGNORECASE)


class _Transform(NamedTuple):
    """swaps: width and height; mirrors_x, mirrors_y: then, left and right, upper and lower."""

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
"""What stands an image of each EXIF orientation upright."""

Box: TypeAlias = tuple[float, float, float, float]
"""Left, upper, right and lower edge in pixels."""


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """A decoded image, upright. size: width and height in full.

    image: at a half, a quarter or an eighth of that where it was decoded so. box: the part of `image` that is the
    image: where a fraction of its size is no whole number, the last column or row of `image` is only partly in it.
    """

    image: Image.Image
    size: tuple[int, int]
    box: Box

    @classmethod
    def whole(cls, image: Image.Image) -> DecodedImage:
        return cls(image, image.size, (0, 0, *image.size))

    @property
    def is_reduced(self) -> bool:
        """Whether it was decoded at a fraction of its size."""
        return self.box != (0, 0, *self.size)


def decode_image(
    data: bytes, limits: MediaConfig, reduction: Callable[[tuple[int, int]], float] | None = None
) -> DecodedImage:
    """The image in a PNG, JPEG, WebP, GIF, BMP, TIFF, AVIF or HEIC file, upright as its EXIF orientation says.

    reduction: how many pixels of an image of that width and height become one. A JPEG of which few are left is
    decoded at a fraction of its size, which takes a fraction of the time; without it every pixel is decoded.
    Raises InvalidImageError if `data` is empty, broken, truncated or no image, has several pages or is an animation,
    or takes too long to decode;
    ImageTooLargeError if it has more bytes, pixels or scans than allowed, which is looked at before anything is
    decoded; CancelledWorkError.
    """
    return decode_opened(open_header(data, limits), limits, reduction)


def decode_opened(
    image: Image.Image, limits: MediaConfig, reduction: Callable[[tuple[int, int]], float] | None = None
) -> DecodedImage:
    """The same of an image that `open_header` has opened."""
    size = image.size
    box = (0, 0, *size) if reduction is None else _draft(image, reduction)
    load_image(image, limits)
    return _upright(DecodedImage(image, size, box))


def open_header(data: bytes, limits: MediaConfig) -> Image.Image:
    """An image of which nothing but the header is read. Raises as `decode_image` does."""
    image = open_any(data, limits)
    try:
        check_single(image)
    except BaseException:
        image.close()
        raise
    return image


def open_any(data: bytes, limits: MediaConfig) -> Image.Image:
    """The same of a file that may have several pages or frames."""
    check_num_bytes(len(data), limits)
    if not data:
        raise InvalidImageError("the image is empty (0 bytes)")
    return open_file(data, limits)


def open_file(data: bytes, limits: MediaConfig) -> Image.Image:
    """An image, or the first of several in a file, of which nothing but the header is read. Raises as `decode_image`
    does, but not for several."""
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
    """An opened image in a process of its own, unless it is in one. Raises as `decode_image` does."""
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
        Image.MAX_IMAGE_PIXELS = limits.max_image_pixels  # Pillow's own limit, which it checks before ours
    image = Image.open(LimitedFile(plain, limits.decode_timeout), formats=_HERE)
    if image.format == "WEBP":
        image.info["exif"] = orientation_exif(orientation_in(image.info.get("exif", b""), image.info.get("xmp", b"")))
    return image


def _opened(open: Callable[[], Image.Image], data: bytes, limits: MediaConfig) -> Image.Image:
    """The image that `open` returns. Turns what libraries raise into this project's errors."""
    try:
        return open()
    except VLMServeError:
        raise
    except UnidentifiedImageError as error:
        raise InvalidImageError(_unreadable(data)) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageTooLargeError(f"the image has more than {limits.max_image_pixels:,} pixels") from error
    except Exception as error:  # Pillow's readers raise anything on broken headers
        raise InvalidImageError(f"the image is broken: {error}") from error


def load_image(image: Image.Image, limits: MediaConfig) -> None:
    """Decode an opened image. Raises as `decode_image` does."""
    check_num_pixels(image, limits)
    if isinstance(file := getattr(image, "fp", None), LimitedFile):
        file.restart()
    _checked(image.load)


def decode_process(image: ImageProcess) -> None:
    """Let a process decode its image, which `load_image` then reads. Raises as `decode_image` does."""
    _checked(image.decode)


def _checked(decode: Callable[[], object]) -> None:
    try:
        decode()
    except VLMServeError:
        raise
    except Exception as error:  # Pillow's decoders raise anything on broken data
        kind = "truncated" if "truncated" in str(error).lower() else "broken"
        raise InvalidImageError(f"the image is {kind}: {error}") from error


def upright(image: Image.Image) -> DecodedImage:
    """A decoded image, rotated as its EXIF orientation says."""
    return _upright(DecodedImage.whole(image))


def check_num_pixels(image: Image.Image, limits: MediaConfig) -> None:
    """Raises ImageTooLargeError if an opened image is over the limit, InvalidImageError if it has no pixels."""
    width, height = image.size
    if width * height > limits.max_image_pixels:
        raise ImageTooLargeError(
            f"the image has {width:,} x {height:,} pixels; at most {limits.max_image_pixels:,} are allowed"
        )
    if width == 0 or height == 0:
        raise InvalidImageError(f"the image has no pixels ({width} x {height})")


def orientation(image: Image.Image) -> int:
    """How the camera was held, from 1 to 8 as in EXIF; 1 if the image does not say."""
    try:
        found = image.getexif().get(_ORIENTATION)
    except Exception:  # broken EXIF data says nothing about how the image stands
        return 1
    return found if found in _TRANSFORMS else 1


def _draft(image: Image.Image, reduction: Callable[[tuple[int, int]], float]) -> Box:
    """Have an opened JPEG decoded at a fraction of its size, if few of its pixels are asked for. Returns its box."""
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
    """The bytes in ``data:image/png;base64,…``. The media type has no effect: the content says what the file is.

    A data URL may stand in the place of the base64 text, as clients write it into fields for base64 alone.
    Raises the kind's error (InvalidImageError) unless it is base64, and that of what is too large (ImageTooLargeError)
    over the limit.
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
    """Where the base64 text of a data URL begins. Raises the kind's error unless there is one."""
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
