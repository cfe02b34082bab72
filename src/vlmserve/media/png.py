"""Drop PNG chunks that decoding does not need; real files often have large or broken ones."""

from __future__ import annotations

import zlib

from vlmserve.media.exif import orientation_exif, orientation_in

SIGNATURE = b"\x89PNG\r\n\x1a\n"
_KEPT = frozenset({b"tRNS", b"acTL", b"fcTL", b"fdAT"})
"""Ancillary chunks that affect pixels: transparency and animation."""
_XMP = b"XML:com.adobe.xmp\0\0"
"""Start of uncompressed XMP."""
_LARGEST_METADATA = 1024**2
"""Maximum bytes of EXIF or XMP; larger chunks are dropped."""
_CONTROL_SIZES = {b"acTL": 8, b"fcTL": 26}
_TRANSPARENCY_SIZES = {0: 2, 2: 6}
"""Minimum bytes of tRNS by color type; a palette allows any number."""
_MOST_CHUNKS = 16_384
"""Maximum chunks of a file. Encoders write one for every 8 KiB or more."""
_HEADER_END = 33
"""Bytes before the first chunk that may contain the orientation."""


def without_metadata(data: bytes) -> bytes | None:
    """Drop ancillary chunks that do not affect pixels, have a wrong size or checksum.

    Keeps only the orientation of EXIF and XMP. Does not check the rest. None: more than 16,384 chunks.
    """
    pieces: list[bytes | memoryview] = []
    view, kept_from, at = memoryview(data), 0, len(SIGNATURE)
    color_type = data[25] if len(data) > 25 else 0
    exif = xmp = b""
    for _ in range(_MOST_CHUNKS):
        if at + 12 > len(data):
            break
        end = at + 12 + int.from_bytes(data[at : at + 4], "big")
        chunk = view[at:end]
        if not _is_needed(chunk, color_type):
            pieces.append(view[kept_from:at])
            kept_from = end
            kind = bytes(chunk[4:8])
            if kind == b"eXIf" and _is_whole(chunk):
                exif = exif or bytes(chunk[8:-4])
            elif kind == b"iTXt" and chunk[8 : 8 + len(_XMP)] == _XMP and _is_whole(chunk):
                xmp = xmp or bytes(chunk[8 + len(_XMP) : -4])
        at = end
    else:
        return None
    if not pieces:
        return data
    plain = b"".join([*pieces, view[kept_from:]])
    if (orientation := orientation_in(exif, xmp)) == 1:
        return plain
    return plain[:_HEADER_END] + _orientation_chunk(orientation) + plain[_HEADER_END:]


def _is_needed(chunk: memoryview, color_type: int) -> bool:
    """True if a chunk is critical, or affects pixels and is valid."""
    kind = bytes(chunk[4:8])
    if not kind[0] & 0x20 or kind == b"fdAT":
        return True
    size = len(chunk) - 12
    if kind not in _KEPT or size < _CONTROL_SIZES.get(kind, 0):
        return False
    if kind == b"tRNS" and size < _TRANSPARENCY_SIZES.get(color_type, 1):
        return False
    return _is_whole(chunk)


def _is_whole(chunk: memoryview) -> bool:
    if len(chunk) - 12 > _LARGEST_METADATA:
        return False
    return zlib.crc32(chunk[4:-4]) == int.from_bytes(chunk[-4:], "big")


def _orientation_chunk(orientation: int) -> bytes:
    body = b"eXIf" + orientation_exif(orientation)
    return (len(body) - 4).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")
