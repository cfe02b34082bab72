"""Keys of images, pages, videos and frames: 32-byte digests of content and preprocessing."""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3
from PIL import Image

from vlmserve.media.images import orientation


def image_key(data: bytes, fingerprint: bytes, salt: str = "") -> bytes:
    """fingerprint: of the preprocessing. salt: different salts share no cache entries."""
    return _digest(b"file", data, fingerprint, salt.encode())


def pil_image_key(image: Image.Image, fingerprint: bytes, salt: str = "") -> bytes:
    """Key of everything that affects the preprocessed pixels."""
    palette = image.palette
    look = (
        image.mode,
        image.size,
        image.info.get("transparency"),
        orientation(image),
        None if palette is None else (palette.mode, bytes(palette.palette)),
    )
    return _digest(b"pil", repr(look).encode(), image.tobytes(), fingerprint, salt.encode())


def video_key(parts: Sequence[bytes], fingerprint: bytes, salt: str = "") -> bytes:
    """parts: its file, or the keys of its frames in order."""
    return _digest(b"video", *parts, fingerprint, salt.encode())


def page_key(document: bytes, number: int, look: bytes, fingerprint: bytes) -> bytes:
    """document: digest with salt. number: from 0. look: rendering settings."""
    return _digest(b"page", document, number.to_bytes(4, "little"), look, fingerprint)


def frame_key(video: bytes, number: int, fingerprint: bytes) -> bytes:
    """video: digest of file and salt. number: from 0."""
    return _digest(b"frame", video, number.to_bytes(4, "little"), fingerprint)


def _digest(*parts: bytes) -> bytes:
    hasher = blake3()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()
