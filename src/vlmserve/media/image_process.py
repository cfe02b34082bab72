"""Images in isolated processes: HEIC with libheif (pillow-heif, extra ``heif``), other formats with Pillow."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from PIL import Image, UnidentifiedImageError

from vlmserve.errors import DocumentTooLargeError, ImageTooLargeError, InvalidImageError
from vlmserve.media.decoding import bytes_per_pixel, too_slow
from vlmserve.media.isolated import Answer, IsolatedProcess
from vlmserve.settings.config import MediaConfig

_HEIF = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"})
_AVIF = frozenset({b"avif", b"avis"})
_ORIENTATION = 0x0112
_BYTES = {
    "L": 1,
    **dict.fromkeys(("LA", "La", "I;16", "I;16B", "I;16L"), 2),
    **dict.fromkeys(("RGB", "YCbCr", "LAB", "HSV"), 3),
    **dict.fromkeys(("RGBA", "RGBa", "RGBX", "CMYK", "I", "F"), 4),
}
"""Bytes per pixel, by Pillow's mode."""
_LARGEST_PADDING = 1024
"""Maximum bytes of padding after a row."""
MEMORY_BYTES = 256 * 1024**2
"""Maximum bytes of a process besides pixels: copies of the file, threads."""


def heif_format(data: bytes) -> str | None:
    """Return HEIF or AVIF for these files, which begin like videos. The brand mif1 may contain AVIF."""
    brand = data[8:12] if data[4:8] == b"ftyp" else None
    if brand in _HEIF and not data[8:64].count(b"avif"):
        return "HEIF"
    return "AVIF" if brand in _HEIF | _AVIF else None


class _Shown(Answer):
    width: int = 0
    height: int = 0
    mode: str = ""
    orientation: int = 1
    stride: int = 0


class _Opened(_Shown):
    images: int = 0
    shown: int = 0


class ImageProcess(Image.Image):
    """Images of a file in a process; opening reads only the header.

    format: "HEIF", "AVIF" or one of `images.FORMATS`. num_pixels: of the image, if opening needs memory for them.

    The process ends after decoding the only image, after an error, and with `close`. Use it from one thread at a time.
    Decoding raises OSError for broken data. Raises UnidentifiedImageError, OSError, InvalidImageError, UnavailableError
    and CancelledWorkError.
    """

    def __init__(self, data: bytes, format: str, limits: MediaConfig, num_pixels: int = 0) -> None:
        super().__init__()
        self.format = format
        self._limits = limits
        self._is_loaded = False
        self._is_document = False
        self._decoded: _Shown | None = None
        self.process = IsolatedProcess("image", limits.decode_timeout, partial(_error_of, limits, False))
        settings = {
            "format": format,
            "memory": MEMORY_BYTES + len(data),
            "pixel_memory": bytes_per_pixel(format),
            "num_pixels": num_pixels,
            "max_images": limits.max_decoded_frames,
            "seconds": math.ceil(limits.decode_timeout) + 1,
        }
        try:
            opened = self.process.open(data, settings, _Opened)
            self.n_frames = opened.images
            self._number = opened.shown
            self._take(opened)
            if not 1 <= self.n_frames <= len(data):
                raise OSError("the decoder returned an invalid description")
        except BaseException:
            self.process.close()
            raise

    def share_time(self) -> None:
        """Limit all images together to the time of a document."""
        self._is_document = True
        self.process.error_of = partial(_error_of, self._limits, True)
        self.process.allow(self._limits.document_timeout)

    @property
    def is_animated(self) -> bool:
        return self.n_frames > 1

    def tell(self) -> int:
        return self._number

    def seek(self, frame: int) -> None:
        """Raises EOFError for a missing image."""
        if not 0 <= frame < self.n_frames:
            raise EOFError("attempt to seek outside sequence")
        if frame != self._number:
            self._take(self._ask(str(frame)))
            self._number, self._is_loaded = frame, False

    def decode(self) -> None:
        """Decode within the time limit. `load` reads the pixels."""
        if self._is_loaded or self._decoded is not None:
            return
        if not self._is_document:
            self.process.allow(self._limits.decode_timeout)
        shown = self._ask("")
        try:
            if shown.width * shown.height > self._limits.max_image_pixels:
                raise OSError("it is larger than its header says")
            self._take(shown)
            row = self.width * _BYTES[self.mode]
            if not row <= shown.stride <= row + _LARGEST_PADDING:
                raise OSError("the decoder returned an invalid description")
        except BaseException:
            self.process.close()
            raise
        self._decoded = shown

    def load(self) -> Any:
        if not self._is_loaded:
            self.decode()
            assert self._decoded is not None
            stride, self._decoded = self._decoded.stride, None
            try:
                pixels = self.process.read(stride * self.height)
            except BaseException:
                self.process.close()
                raise
            if not self.is_animated:
                self.process.close()
            self.im = Image.frombytes(self.mode, self.size, pixels, "raw", (self.mode, stride)).im
            self._is_loaded = True
        return super().load()

    def close(self) -> None:
        self.process.close()
        super().close()

    def _ask(self, line: str) -> _Shown:
        try:
            return self.process.ask(line, _Shown)
        except BaseException:
            self.process.close()
            raise

    def _take(self, shown: _Shown) -> None:
        if min(shown.width, shown.height) < 0 or shown.mode not in _BYTES or not 0 <= shown.orientation < 2**16:
            raise OSError("the decoder returned an invalid description")
        self._size, self._mode = (shown.width, shown.height), shown.mode
        exif = Image.Exif()
        exif[_ORIENTATION] = shown.orientation
        self.info["exif"], self._exif = exif.tobytes(), None


def _error_of(limits: MediaConfig, is_document: bool, reason: str, detail: str) -> Exception:
    match reason:
        case "missing":
            return InvalidImageError("reading HEIC needs pillow-heif: pip install 'vlmserve[heif]', or send a JPEG")
        case "unidentified":
            return UnidentifiedImageError(detail)
        case "slow":
            if is_document:
                return DocumentTooLargeError(
                    f"the document takes longer than {limits.document_timeout:g} s to decode "
                    "(--document-timeout); choose fewer of its pages"
                )
            return too_slow(limits.decode_timeout)
        case "memory":
            return ImageTooLargeError(
                f"decoding the image takes more than its pixels and {MEMORY_BYTES // 2**20} MiB of memory, the limit; "
                "send a smaller one"
            )
        case "aborted":
            return InvalidImageError(
                "the decoder aborted: the image is broken, or takes more than its pixels and "
                f"{MEMORY_BYTES // 2**20} MiB of memory; send it as PNG or JPEG"
            )
        case "crash":
            return InvalidImageError("the image is broken: it crashed the process that decoded it")
        case "killed":
            return InvalidImageError(
                "the process that decoded the image was killed, perhaps for lack of memory; send a smaller one"
            )
    return OSError(detail or "it cannot be decoded")
