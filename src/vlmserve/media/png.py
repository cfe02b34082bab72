"""PNG files without the chunks that decoding does not need, which are often large or broken in real files."""

from __future__ import annotations

import zlib

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_KEPT = frozenset({b"tRNS", b"eXIf", b"acTL", b"fcTL", b"fdAT"})
"""Ancillary chunks that decide pixels: transparency, orientation, animation."""
_XMP = b"XML:com.adobe.xmp\0\0"
"""Beginning of uncompressed XMP, which may say the orientation."""
_LARGEST_METADATA = 1024**2
"""Bytes of EXIF or XMP; larger chunks are dropped."""
_CONTROL_SIZES = {b"acTL": 8, b"fcTL": 26}
_TRANSPARENCY_SIZES = {0: 2, 2: 6}
"""Minimum bytes of tRNS by color type; a palette takes any number."""
_MOST_CHUNKS = 65_536


def without_metadata(data: bytes) -> bytes:
    """Drop ancillary chunks of a PNG that decide no pixels, or are too short or large or have a wrong checksum.

    Any other data is returned as it is, as are files with more than 65,536 chunks. The rest is not checked.
    """
    if not data.startswith(_SIGNATURE):
        return data
    pieces: list[memoryview] = []
    view, kept_from, at = memoryview(data), 0, len(_SIGNATURE)
    color_type = data[25] if len(data) > 25 else 0
    for _ in range(_MOST_CHUNKS):
        if at + 12 > len(data):
            break
        end = at + 12 + int.from_bytes(data[at : at + 4], "big")
        if not _is_needed(view[at:end], color_type):
            pieces.append(view[kept_from:at])
            kept_from = end
        at = end
    if not pieces or at < len(data) - 12:
        return data
    return b"".join([*pieces, view[kept_from:]])


def _is_needed(chunk: memoryview, color_type: int) -> bool:
    """Whether a chunk, with its length and checksum, is critical or decides pixels and can be used."""
    kind = bytes(chunk[4:8])
    if not kind[0] & 0x20:
        return True
    size = len(chunk) - 12
    is_xmp = kind == b"iTXt" and bytes(chunk[8 : 8 + len(_XMP)]) == _XMP
    if not is_xmp and kind not in _KEPT:
        return False
    if kind == b"fdAT":
        return True
    if size > _LARGEST_METADATA or size < _CONTROL_SIZES.get(kind, 0):
        return False
    if kind == b"tRNS" and size < _TRANSPARENCY_SIZES.get(color_type, 1):
        return False
    return zlib.crc32(chunk[4:-4]) == int.from_bytes(chunk[-4:], "big")
