"""Drop JPEG segments that decoding does not need, and count scans, because each scan takes time."""

from __future__ import annotations

import re

import numpy as np

from vlmserve.errors import ImageTooLargeError
from vlmserve.media.exif import orientation_exif, orientation_in
from vlmserve.settings.config import MediaConfig

SIGNATURE = b"\xff\xd8\xff"
_MOST_SEGMENTS = 4096
"""Maximum segments before the first scan. A profile or picture of 64 MB takes a quarter of them."""
_FREE_SCANS = 16
"""Allowed scans for a JPEG of the maximum size; smaller images may have more. Encoders write up to 13."""
_MOST_SCANS = 1000
_MOST_MARKERS = 65536
_SCAN = b"\xff\xda"
_MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd8\xff])")
_SCAN_CODE, _END_CODE, _COMMENT_CODE, _EXIF_CODE = 0xDA, 0xD9, 0xFE, 0xE1
_METADATA_CODES = frozenset({*range(0xE0, 0xF0), _COMMENT_CODE}) - {0xE0, 0xEE}
"""Application segments, except JFIF and Adobe, which affect colors."""
_UNKNOWN_CODES = frozenset({0xC8, *range(0xF0, 0xFE)})
"""Reserved segments. Pillow does not skip their content, so it may find other segments in it."""
_XMP = b"http://ns.adobe.com/xap/1.0/\0"


def without_metadata(data: bytes) -> bytes | None:
    """Drop comments, profiles, previews, later pictures, and EXIF and XMP except for the orientation.

    Does not check the rest. None: more than 4,096 segments, or a reserved one.
    """
    pieces = [data[:2]]
    exif = xmp = b""
    dropped, at, end = False, 2, len(data)
    for _ in range(_MOST_SEGMENTS):
        found = _MARKER.search(data, at)
        if found is None or (code := found[1][0]) == _SCAN_CODE:
            break
        if code == _END_CODE:  # Pillow also reads segments after an early end
            end = found.end()
            break
        if code in _UNKNOWN_CODES:
            return None
        at = _end(data, found)
        if code not in _METADATA_CODES:
            pieces.append(data[found.start() : at])
            continue
        dropped = True
        content = data[found.end() + 2 : at]
        if code == _EXIF_CODE and content.startswith(_XMP):
            xmp = xmp or content
        elif code == _EXIF_CODE:
            exif = exif or content
    else:
        return None
    if not dropped and end == len(data):
        return data
    if (orientation := orientation_in(exif, xmp)) != 1:
        content = orientation_exif(orientation)
        pieces.append(bytes([0xFF, _EXIF_CODE]) + (2 + len(content)).to_bytes(2, "big") + content)
    return b"".join([*pieces, data[at:end]])


def has_many_scans(data: bytes, num_pixels: int, limits: MediaConfig) -> bool:
    """True if a file has more scans than encoders write. Each scan is a pass over all pixels.

    Raises ImageTooLargeError if decoding would take far longer.
    """
    most = min(_MOST_SCANS, _FREE_SCANS * max(1, limits.max_image_pixels // max(1, num_pixels)))
    # First an upper bound, because following the markers takes longer.
    if _most_scans(data) <= _FREE_SCANS:
        return False
    scans = _num_scans(data, most)
    if scans > most:
        raise ImageTooLargeError(
            f"the image is a progressive JPEG with more than {most} scans; save it again as an ordinary JPEG"
        )
    return scans > _FREE_SCANS


def _most_scans(data: bytes) -> int:
    """Byte pairs that look like the start of a scan."""
    array = np.frombuffer(data, np.uint8)
    marks = np.flatnonzero(array[:-1] == _SCAN[0])
    return int(np.count_nonzero(array[marks + 1] == _SCAN[1]))


def _num_scans(data: bytes, most: int) -> int:
    scans, at = 0, 2
    for _ in range(_MOST_MARKERS):
        found = _MARKER.search(data, at)
        if found is None or found[1][0] == _END_CODE:
            return scans
        scans += found[1][0] == _SCAN_CODE
        if scans > most:
            return scans
        at = _end(data, found)
    return most + 1


def _end(data: bytes, found: re.Match[bytes]) -> int:
    return found.end() + max(2, int.from_bytes(data[found.end() : found.end() + 2], "big"))
