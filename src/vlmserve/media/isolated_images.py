"""Image decoder of isolated processes: HEIC with libheif, other formats with Pillow."""

from __future__ import annotations

import contextlib
import io
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from vlmserve.media.isolated_limits import Answer, RefusedError, address_space, limit, limit_cpu, peak_address_space

_THREADS = 4
"""Threads that decode an image."""
_ORIENTATION = 0x0112
_PIXEL_BYTES = {"I;16": 2, "I;16B": 2, "I;16L": 2, "I": 4, "F": 4, "RGBX": 4}
"""Bytes per pixel, for modes whose bands have more or less than one byte."""
_SUBFILE_TYPE = 254
_NO_PAGE = 0b101
"""Bits of a TIFF's NewSubfileType: a smaller version of another page, or a mask (TIFF 6.0, page 36)."""
_LARGEST_PIXEL = 8
"""Bytes per pixel of the largest array that a decoder allocates."""
_BAND = 2**17
"""Pixels to pack at once, so that they stay in a core's cache."""


class _Opened(Protocol):
    """size, mode: of the current image."""

    count: int
    number: int
    size: tuple[int, int]
    mode: str

    def __init__(self, data: bytes, most: int) -> None: ...

    def go_to(self, number: int) -> None: ...

    def orientation(self) -> object: ...

    def decode(self) -> tuple[int, Iterable[bytes | memoryview]]:
        """Row stride in bytes, and all rows."""
        ...


class _HEIC:
    def __init__(self, data: bytes, most: int) -> None:
        import pillow_heif
        from PIL import Image

        self._holder = Image.Image()
        try:
            self._file = pillow_heif.open_heif(data, convert_hdr_to_8bit=True, hdr_to_16bit=True, remove_stride=False)
        except (OSError, ValueError, RuntimeError, EOFError) as error:
            raise SyntaxError(str(error)) from error
        self.count = len(self._file)
        self.go_to(self._file.primary_index)

    def go_to(self, number: int) -> None:
        self.number = number
        self._image = self._file[number]
        self.size, self.mode = self._image.size, self._image.mode

    def orientation(self) -> object:
        import pillow_heif

        pillow_heif.set_orientation(self._image.info)  # libheif has rotated the image, so ignore EXIF
        self._holder.info, self._holder._exif = self._image.info, None
        return self._holder.getexif().get(_ORIENTATION)

    def decode(self) -> tuple[int, Iterable[bytes | memoryview]]:
        pixels = memoryview(self._image.data)
        self.size, stride = self._image.size, self._image.stride
        num_bytes = stride * self.size[1]
        if len(pixels) < num_bytes:
            raise ValueError("not enough image data")
        return stride, [pixels[:num_bytes]]


class _PillowFile:
    """Converts images with a palette."""

    formats: tuple[str, ...] = ("BMP", "GIF", "PNG", "WEBP")

    def __init__(self, data: bytes, most: int) -> None:
        self._image = self._opened(io.BytesIO(data))
        self._numbers: Sequence[int] = self._found(most)
        self.count, self.number = len(self._numbers), 0
        self._show()

    def _opened(self, file: io.BytesIO) -> Any:
        from PIL import Image

        return Image.open(file, formats=self.formats)

    def _found(self, most: int) -> Sequence[int]:
        return range(getattr(self._image, "n_frames", 1))

    def _show(self) -> None:
        self.size, self.mode = self._image.size, "RGB"

    def go_to(self, number: int) -> None:
        self._image.seek(self._numbers[number])
        self.number = number
        self._show()

    def orientation(self) -> object:
        return self._image.getexif().get(_ORIENTATION)

    def decode(self) -> tuple[int, Iterable[bytes | memoryview]]:
        self._image.load()
        image = self._image
        if image.info.get("transparency") is not None or (image.mode in ("PA", "P") and "A" in image.palette.mode):
            image = image.convert("RGBA")
        elif image.mode in ("1", "P"):
            image = image.convert("RGB")
        self.size, self.mode = image.size, image.mode
        width, height = image.size
        rows = max(1, _BAND // width)
        bands = (image.crop((0, top, width, min(top + rows, height))).tobytes() for top in range(0, height, rows))
        return width * _PIXEL_BYTES.get(image.mode, len(image.getbands())), bands


class _AVIF(_PillowFile):
    def _opened(self, file: io.BytesIO) -> Any:
        from PIL import AvifImagePlugin

        return AvifImagePlugin.AvifImageFile(file)


class _JPEG(_PillowFile):
    """The first picture of a file. Pillow's `open` would also treat later pictures as images."""

    def _opened(self, file: io.BytesIO) -> Any:
        from PIL import JpegImagePlugin

        return JpegImagePlugin.JpegImageFile(file)


class _TIFF(_PillowFile):
    """Omits smaller versions and masks."""

    formats = ("TIFF",)

    def _found(self, most: int) -> Sequence[int]:
        """Numbers of up to ``most + 1`` pages."""
        pages, number = [0], 1
        while len(pages) <= most and number < 2 * most and self._reaches(number):
            kind = self._image.tag_v2.get(_SUBFILE_TYPE)
            if not (isinstance(kind, int) and kind & _NO_PAGE):
                pages.append(number)
            number += 1
        self._image.seek(0)
        return pages

    def _reaches(self, number: int) -> bool:
        try:
            self._image.seek(number)
        except MemoryError:
            raise
        except Exception:  # Pillow raises anything for a broken page, where the file then ends
            return False
        return True


_FORMATS: dict[str, type[_Opened]] = {
    "AVIF": _AVIF,
    "JPEG": _JPEG,
    "TIFF": _TIFF,
    **dict.fromkeys(_PillowFile.formats, _PillowFile),
}


class ImageDecoder:
    """A line selects an image by number; an empty line decodes it."""

    def __init__(self) -> None:
        from PIL import AvifImagePlugin, Image

        # Trigger Pillow's lazy imports.
        Image.new("RGB", (1, 1)).tobytes()
        Image.Exif().load(b"Exif\0\0II*\0\x08\0\0\0\0\0")
        AvifImagePlugin.DEFAULT_MAX_THREADS = _THREADS
        Image.MAX_IMAGE_PIXELS = None  # the parent checks the size before decoding
        self._formats = dict(_FORMATS)
        Image.preinit()
        try:
            import pillow_heif
        except ImportError:
            return  # opening a HEIC file will fail
        pillow_heif.options.THUMBNAILS = False
        pillow_heif.options.DECODE_THREADS = _THREADS
        self._formats["HEIF"] = _HEIC

    def open(self, data: bytes, settings: dict[str, Any]) -> dict[str, Any]:
        """Returns the number of images, and fields of the first shown image."""
        from PIL import UnidentifiedImageError

        self._settings = settings
        if settings["format"] not in self._formats:
            raise RefusedError("missing")
        kind = self._formats[settings["format"]]
        try:
            with self._allowed(settings["num_pixels"]):
                self._file = kind(data, settings["max_images"])
        except (UnidentifiedImageError, SyntaxError, IndexError, TypeError, struct.error) as error:
            # Pillow's and libheif's errors for other formats.
            raise RefusedError("unidentified") from error
        return {"images": self._file.count, "shown": self._file.number, **self._fields()}

    def answer(self, line: str) -> Answer:
        with self._allowed(math.prod(self._file.size)):
            if line:
                self._file.go_to(int(line))
                return self._fields(), ()
            stride, pixels = self._file.decode()
        return {**self._fields(), "stride": stride}, pixels

    @contextlib.contextmanager
    def _allowed(self, num_pixels: int) -> Iterator[None]:
        """Raise MemoryError for errors due to a lack of memory; some libraries report only that decoding failed."""
        before = peak_address_space()
        most = address_space() + self._settings["memory"] + num_pixels * self._settings["pixel_memory"]
        limit("RLIMIT_AS", most, for_good=False)
        limit_cpu(self._settings["seconds"] * _THREADS)
        try:
            yield
        except Exception as error:
            peak = peak_address_space()
            if peak > before and most - peak < num_pixels * _LARGEST_PIXEL:
                raise MemoryError from error
            raise

    def _fields(self) -> dict[str, Any]:
        try:
            orientation = self._file.orientation()
        except Exception:  # broken EXIF data has no orientation
            orientation = None
        width, height = self._file.size
        return {
            "width": width,
            "height": height,
            "mode": self._file.mode,
            "orientation": orientation if isinstance(orientation, int) else 1,
        }
