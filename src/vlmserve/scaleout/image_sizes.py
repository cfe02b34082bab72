"""Read an image's size from the first bytes of its file."""

from __future__ import annotations

import binascii
import struct

HEAD_CHARACTERS = 16 * 1024
"""Base64 characters to read. The size of a JPEG with a longer preview stays unknown."""
_JPEG_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})


def size_of_base64(text: str) -> tuple[int, int] | None:
    """None: the head does not say."""
    try:
        return size_of(binascii.a2b_base64(text[:HEAD_CHARACTERS]))
    except (binascii.Error, ValueError):
        return None


def size_of(head: bytes) -> tuple[int, int] | None:
    """Width and height; None: the head does not say."""
    try:
        if head[:8] == b"\x89PNG\r\n\x1a\n":
            width, height = struct.unpack_from(">II", head, 16)
        elif head[:6] in (b"GIF87a", b"GIF89a"):
            width, height = struct.unpack_from("<HH", head, 6)
        elif head[:4] == b"RIFF" and head[8:12] == b"WEBP":
            return _webp_size(head)
        elif head[:2] == b"\xff\xd8":
            return _jpeg_size(head)
        else:
            return None
    except (struct.error, IndexError):
        return None
    return width, height


def _jpeg_size(head: bytes) -> tuple[int, int] | None:
    position = 2
    while head[position] == 0xFF:
        marker = head[position + 1]
        if marker in _JPEG_FRAMES:
            height, width = struct.unpack_from(">HH", head, position + 5)
            return width, height
        position += 2 + struct.unpack_from(">H", head, position + 2)[0]
    return None


def _webp_size(head: bytes) -> tuple[int, int] | None:
    kind = head[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(head[24:27], "little"), 1 + int.from_bytes(head[27:30], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", head, 26)
        return width & 0x3FFF, height & 0x3FFF
    return None
