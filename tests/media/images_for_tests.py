"""Images of every kind that people send, made on the spot."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from PIL import Image


class MadeWhenAsked(Mapping[str, bytes]):
    """Files by name, each made when it is first asked for: every process of the tests imports every module."""

    def __init__(self, makers: Mapping[str, Callable[[], bytes]]) -> None:
        self._makers = makers
        self._made: dict[str, bytes] = {}

    def __getitem__(self, name: str) -> bytes:
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """A smooth gradient with noise, so that resampling, channel order and orientation all show."""
    random = np.random.default_rng(seed)
    ramp = np.linspace(0, 200, width)[None, :, None] * np.array([1.0, 0.5, 0.2, 0.9])
    levels = ramp + np.linspace(0, 40, height)[:, None, None] + random.integers(0, 15, (height, width, 4))
    rgba = Image.fromarray(levels.clip(0, 255).astype(np.uint8), "RGBA")
    return rgba if mode == "RGBA" else rgba.convert("RGB").convert(mode)


def photo(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Detail of every size, of which there is the less the finer it is, as in what cameras see."""
    random = np.random.default_rng(seed)
    levels = np.full((height, width, 3), 128.0)
    for step in (2, 4, 8, 16, 32, 64, 128):
        coarse = random.normal(0, 255, (height // step + 2, width // step + 2, 3)).clip(-128, 127) + 128
        layer = Image.fromarray(coarse.astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
        levels += (np.asarray(layer) - 128.0) * min(1.0, step / 64) / 3
    return Image.fromarray(levels.clip(0, 255).astype(np.uint8)).convert(mode)


def encoded(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    """The image as a file."""
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def exif_rotated(width: int, height: int, orientation: int) -> bytes:
    """A JPEG that says how the camera was held."""
    return encoded(noise(width, height), "JPEG", quality=95, exif=orientation_exif(orientation))


def orientation_exif(number: int) -> Image.Exif:
    """EXIF data that says how the camera was held."""
    exif = Image.Exif()
    exif[0x0112] = number
    return exif


def palette_with_transparency() -> bytes:
    """A PNG with a palette, one colour of which is transparent."""
    image = noise(30, 20).quantize(8)
    return encoded(image, "PNG", transparency=3)


def png_header(width: int, height: int) -> bytes:
    """A few bytes that claim to be a large image."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    row = zlib.compress(bytes(1 + 3 * 64), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", row) + chunk(b"IEND", b"")
