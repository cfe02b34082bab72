"""Images in an isolated process: HEIC through libheif, other formats through Pillow."""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterable
from typing import Any, Protocol

from vlmserve.media.isolated_limits import Answer, RefusedError, address_space, limit, limit_cpu

_THREADS = 4
"""That decode one image."""
_ORIENTATION = 0x0112
"""EXIF tag of how the camera was held."""
_ANIMATIONS = ("GIF", "WEBP", "PNG")
_PIXEL_BYTES = {"I;16": 2}
"""Bytes of a pixel in modes in which a band is not one byte."""
_BAND = 2**17
"""Pixels that are packed at once: few enough to stay in a core's cache."""


class _Opened(Protocol):
    """An opened file of images. count: of them. number: which is shown, from 0. size, mode: of that one."""

    count: int
    number: int
    size: tuple[int, int]
    mode: str

    def __init__(self, data: bytes) -> None: ...

    def go_to(self, number: int) -> None:
        """Show another image."""
        ...

    def orientation(self) -> object:
        """How EXIF says that the image stands."""
        ...

    def decode(self) -> tuple[int, Iterable[bytes | memoryview]]:
        """Bytes from one row to the next, and all rows."""
        ...


class _HEIC:
    """Read by libheif."""

    def __init__(self, data: bytes) -> None:
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

        pillow_heif.set_orientation(self._image.info)  # libheif has turned the image, which EXIF is not to do again
        self._holder.info, self._holder._exif = self._image.info, None
        return self._holder.getexif().get(_ORIENTATION)

    def decode(self) -> tuple[int, Iterable[bytes | memoryview]]:
        pixels = memoryview(self._image.data)
        self.size, stride = self._image.size, self._image.stride
        num_bytes = stride * self.size[1]
        if len(pixels) < num_bytes:
            raise ValueError("not enough image data")
        return stride, [pixels[:num_bytes]]


class _AVIF:
    """Read by Pillow."""

    def __init__(self, data: bytes) -> None:
        self._image = self._opened(data)
        self.count, self.number = self._image.n_frames, self._image.tell()
        self.size, self.mode = self._image.size, self._image.mode

    def _opened(self, data: bytes) -> Any:
        from PIL import AvifImagePlugin

        return AvifImagePlugin.AvifImageFile(io.BytesIO(data))

    def go_to(self, number: int) -> None:
        self._image.seek(number)
        self.number, self.size, self.mode = number, self._image.size, self._image.mode

    def orientation(self) -> object:
        return self._image.getexif().get(_ORIENTATION)

    def decode(self) -> tuple[int, Iterable[bytes | memoryview]]:
        self._image.load()
        return self._packed(self._image)

    def _packed(self, image: Any) -> tuple[int, Iterable[bytes]]:
        self.size, self.mode = image.size, image.mode
        width, height = image.size
        rows = max(1, _BAND // width)
        bands = (image.crop((0, top, width, min(top + rows, height))).tobytes() for top in range(0, height, rows))
        return width * _PIXEL_BYTES.get(image.mode, len(image.getbands())), bands


class _Animation(_AVIF):
    """Frames of a GIF, WebP or PNG file, read by Pillow. They are sent in a mode without a palette."""

    def _opened(self, data: bytes) -> Any:
        from PIL import Image

        return Image.open(io.BytesIO(data), formats=_ANIMATIONS)

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.mode = "RGB"

    def go_to(self, number: int) -> None:
        super().go_to(number)
        self.mode = "RGB"

    def decode(self) -> tuple[int, Iterable[bytes | memoryview]]:
        self._image.load()
        image = self._image
        if image.info.get("transparency") is not None:
            image = image.convert("RGBA")
        elif image.mode in ("1", "P"):
            image = image.convert("RGB")
        return self._packed(image)


class ImageDecoder:
    """A line is a number, which goes to that image of the file, or empty, which decodes it."""

    def __init__(self) -> None:
        from PIL import AvifImagePlugin, Image

        # What Pillow imports when it is first asked for.
        Image.new("RGB", (1, 1)).tobytes()
        Image.Exif().load(b"Exif\0\0II*\0\x08\0\0\0\0\0")
        AvifImagePlugin.DEFAULT_MAX_THREADS = _THREADS
        self._formats: dict[str, type[_Opened]] = {"AVIF": _AVIF, **dict.fromkeys(_ANIMATIONS, _Animation)}
        Image.preinit()
        try:
            import pillow_heif
        except ImportError:
            return  # which is an error when the first HEIC comes
        pillow_heif.options.THUMBNAILS = False
        pillow_heif.options.DECODE_THREADS = _THREADS
        self._formats["HEIF"] = _HEIC

    def open(self, data: bytes, settings: dict[str, Any]) -> dict[str, Any]:
        """The number of images, and the fields of the first that is shown."""
        self._settings = settings
        if settings["format"] not in self._formats:
            raise RefusedError("missing")
        self._allow(settings["num_pixels"] * settings["pixel_memory"])
        try:
            self._file = self._formats[settings["format"]](data)
        except (SyntaxError, IndexError, TypeError, struct.error) as error:  # those that say it is another format
            raise RefusedError("unidentified") from error
        return {"images": self._file.count, "shown": self._file.number, **self._fields()}

    def answer(self, line: str) -> Answer:
        """The fields of an image, and its pixels if it is decoded."""
        self._allow(math.prod(self._file.size) * self._settings["pixel_memory"])
        if line:
            self._file.go_to(int(line))
            return self._fields(), ()
        stride, pixels = self._file.decode()
        return {**self._fields(), "stride": stride}, pixels

    def _allow(self, memory: int) -> None:
        """Bytes beyond what is always allowed, and the time for one image."""
        limit("RLIMIT_AS", address_space() + self._settings["memory"] + memory, for_good=False)
        limit_cpu(self._settings["seconds"] * _THREADS)

    def _fields(self) -> dict[str, Any]:
        try:
            orientation = self._file.orientation()
        except Exception:  # broken EXIF data says nothing about how the image stands
            orientation = None
        width, height = self._file.size
        return {
            "width": width,
            "height": height,
            "mode": self._file.mode,
            "orientation": orientation if isinstance(orientation, int) else 1,
        }
