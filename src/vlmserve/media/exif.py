"""The EXIF orientation, the only metadata of images that vlmserve uses."""

from __future__ import annotations

import re
import struct

_PREFIX = b"Exif\0\0"
_ORIENTATION = 0x0112
_MOST_TAGS = 1000
"""Maximum tags to read; cameras write fewer than 100."""
_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
_VALUES = {3: "H", 4: "I"}
"""Formats of the tag types SHORT and LONG."""
_XMP = re.compile(rb'tiff:Orientation(?:="|>)([1-8])')


def orientation_in(exif: bytes, xmp: bytes = b"") -> int:
    """Orientation (1 to 8) from EXIF, else from XMP, else 1. Reads a bounded number of tags."""
    said = _exif_orientation(exif.removeprefix(_PREFIX))
    if said is None and (found := _XMP.search(xmp)) is not None:
        said = int(found[1])
    return said if said is not None and 1 <= said <= 8 else 1


def orientation_exif(number: int) -> bytes:
    return _PREFIX + struct.pack("<4sIHHHIIxxxx", b"II*\0", 8, 1, _ORIENTATION, 3, 1, number)


def _exif_orientation(tiff: bytes) -> int | None:
    order = _ORDERS.get(tiff[:4])
    if order is None or len(tiff) < 8:
        return None
    (start,) = struct.unpack_from(f"{order}I", tiff, 4)
    if start + 2 > len(tiff):
        return None
    (count,) = struct.unpack_from(f"{order}H", tiff, start)
    tags = tiff[start + 2 : start + 2 + 12 * min(count, _MOST_TAGS)]
    for tag, kind, number, value in struct.iter_unpack(f"{order}HHI4s", tags[: len(tags) // 12 * 12]):
        if tag == _ORIENTATION:
            return struct.unpack_from(order + _VALUES[kind], value)[0] if kind in _VALUES and number == 1 else None
    return None
