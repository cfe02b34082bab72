"""HEIC images, through libheif (pillow-heif, the extra ``documents``), which is loaded when one comes."""

from __future__ import annotations

import functools

from vlmserve.errors import InvalidImageError

_HEIF = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"})
_AVIF = frozenset({b"avif", b"avis"})


def is_heif(data: bytes) -> bool:
    """Whether a file says that it is HEIF. mif1 may be AVIF inside, which Pillow reads by itself."""
    return _brand(data) in _HEIF and not data[8:64].count(b"avif")


def is_still(data: bytes) -> bool:
    """Whether a file that begins like a video holds images instead."""
    return _brand(data) in _HEIF | _AVIF


@functools.cache
def register_heif() -> None:
    """Let Pillow read HEIC. Raises InvalidImageError where libheif is not installed."""
    try:
        import pillow_heif
    except ImportError as error:
        raise InvalidImageError(
            "HEIC images are not read here; install vlmserve with the extra [documents], or send a JPEG"
        ) from error
    pillow_heif.register_heif_opener(thumbnails=False)


def _brand(data: bytes) -> bytes | None:
    return data[8:12] if data[4:8] == b"ftyp" else None
