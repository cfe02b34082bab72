"""Keys of images, pages, videos and frames: 32-byte digests of their content and of how it is turned into pixels."""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3
from PIL import Image

from vlmserve.media.images import orientation


def image_key(data: bytes, fingerprint: bytes, salt: str = "") -> bytes:
    """Key of the image file `data`, preprocessed as `fingerprint` says.

    salt: requests with different ones share nothing that is cached under the key.
    """
    return _digest(b"file", data, fingerprint, salt.encode())


def pil_image_key(image: Image.Image, fingerprint: bytes, salt: str = "") -> bytes:
    """Key of a decoded image: everything about it that its pixels after preprocessing depend on. salt: as above."""
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
    """Key of a video: of its file, or of the keys of its frames, in order. salt: as above."""
    return _digest(b"video", *parts, fingerprint, salt.encode())


def page_key(document: bytes, number: int, look: bytes, fingerprint: bytes) -> bytes:
    """Key of a page. document: digest of it and the salt. number: from 0. look: what decides how it is rendered."""
    return _digest(b"page", document, number.to_bytes(4, "little"), look, fingerprint)


def frame_key(video: bytes, number: int, fingerprint: bytes) -> bytes:
    """Key of a frame as an image. video: digest of its file and the salt. number: from 0."""
    return _digest(b"frame", video, number.to_bytes(4, "little"), fingerprint)


def _digest(*parts: bytes) -> bytes:
    hasher = blake3()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()
