"""Pictures of every kind that people send, made on the spot."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
from PIL import Image


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """A smooth gradient with noise, so that resampling, channel order and orientation all show."""
    random = np.random.default_rng(seed)
    ramp = np.linspace(0, 200, width)[None, :, None] * np.array([1.0, 0.5, 0.2, 0.9])
    levels = ramp + np.linspace(0, 40, height)[:, None, None] + random.integers(0, 15, (height, width, 4))
    rgba = Image.fromarray(levels.clip(0, 255).astype(np.uint8), "RGBA")
    return rgba if mode == "RGBA" else rgba.convert("RGB").convert(mode)


def encoded(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    """The picture as a file."""
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def exif_rotated(width: int, height: int, orientation: int) -> bytes:
    """A JPEG that says how the camera was held."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(noise(width, height), "JPEG", quality=95, exif=exif)


def palette_with_transparency() -> bytes:
    """A PNG with a palette, one colour of which is transparent."""
    image = noise(30, 20).quantize(8)
    return encoded(image, "PNG", transparency=3)


def png_header(width: int, height: int) -> bytes:
    """A few bytes that claim to be a large picture."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    row = zlib.compress(bytes(1 + 3 * 64), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", row) + chunk(b"IEND", b"")
