"""Chunks of PNG files that decoding does not need are skipped, whatever is in them."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from tests.media.images_for_tests import encoded, noise, orientation_exif
from vlmserve.errors import InvalidImageError
from vlmserve.media.images import decode_image
from vlmserve.media.png import without_metadata
from vlmserve.settings.config import MediaConfig

LIMITS = MediaConfig()
LARGE = 5 * 1024**2


def chunk(kind: bytes, content: bytes, checksum: int | None = None) -> bytes:
    checksum = zlib.crc32(kind + content) if checksum is None else checksum
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)


METADATA = {
    "profile": chunk(b"iCCP", b"name\0\0" + zlib.compress(bytes(LARGE))),
    "compressed text": chunk(b"zTXt", b"name\0\0" + zlib.compress(bytes(LARGE))),
    "text": chunk(b"tEXt", b"name\0" + b"x" * LARGE),
    "XMP": chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(bytes(LARGE))),
    "plain XMP": chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + b"x" * LARGE),
    "wrong checksum": chunk(b"tEXt", b"name\0text", 0),
    "short pHYs": chunk(b"pHYs", b"\0\0"),
    "short gAMA": chunk(b"gAMA", b"\0"),
    "short cHRM": chunk(b"cHRM", b"\0"),
    "empty sRGB": chunk(b"sRGB", b""),
    "short tRNS": chunk(b"tRNS", b"\0"),
    "tRNS with a wrong checksum": chunk(b"tRNS", bytes(6), 0),
    "short acTL": chunk(b"acTL", b"\0"),
    "EXIF with a wrong checksum": chunk(b"eXIf", orientation_exif(6).tobytes(), 0),
    "unknown": chunk(b"abCd", b"anything", 0),
}


@pytest.mark.parametrize("metadata", METADATA.values(), ids=METADATA.keys())
@pytest.mark.parametrize("place", ["before", "after"])
def test_metadata_does_not_hide_an_image(metadata: bytes, place: str) -> None:
    image = noise(30, 20)
    data = encoded(image)
    at = 33 if place == "before" else len(data) - 12
    shown = decode_image(data[:at] + metadata + data[at:], LIMITS)
    np.testing.assert_array_equal(np.asarray(shown.image), np.asarray(image))


def test_what_decides_pixels_is_kept() -> None:
    data = encoded(noise(30, 20))
    exif = orientation_exif(6).tobytes()
    assert decode_image(data[:33] + chunk(b"eXIf", exif.removeprefix(b"Exif\0\0")) + data[33:], LIMITS).size == (20, 30)
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    text = chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp)
    assert decode_image(data[:33] + text + data[33:], LIMITS).size == (20, 30)
    palette = Image.new("P", (4, 4))
    palette.info["transparency"] = bytes([0] * 3)
    assert "transparency" in decode_image(encoded(palette, transparency=b"\0\1"), LIMITS).image.info
    frames = encoded(noise(9, 9), save_all=True, append_images=[noise(9, 9, seed=1)])
    with pytest.raises(InvalidImageError, match="animation of 2 frames"):
        decode_image(frames, LIMITS)


def test_files_without_metadata_are_not_copied() -> None:
    for data in (encoded(noise(30, 20)), encoded(noise(9, 9), "JPEG"), b"", b"\x89PNG\r\n\x1a\n"):
        assert without_metadata(data) is data


@pytest.mark.parametrize("share", [0.2, 0.6, 0.9])
def test_truncated_files_stay_truncated(share: float) -> None:
    data = encoded(noise(90, 60))
    data = data[:33] + METADATA["text"] + data[33:]
    with pytest.raises(InvalidImageError, match=r"truncated|broken"):
        decode_image(data[: 33 + len(METADATA["text"]) + int(9000 * share)], LIMITS)


def test_many_chunks_are_bounded() -> None:
    data = encoded(noise(30, 20))
    many = data[:33] + chunk(b"abCd", b"") * 100_000 + data[33:]
    assert without_metadata(many) is None
    assert decode_image(many, LIMITS).size == (30, 20)
