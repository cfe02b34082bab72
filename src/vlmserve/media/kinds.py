"""What differs between images, videos and documents: errors, limits of bytes, examples of data URLs."""

from __future__ import annotations

from typing import NamedTuple

from vlmserve.config import MediaConfig
from vlmserve.errors import (
    DocumentTooLargeError,
    ImageTooLargeError,
    InvalidDocumentError,
    InvalidImageError,
    InvalidRequestError,
    InvalidVideoError,
    VideoTooLargeError,
)
from vlmserve.types import MediaKind


class _Kind(NamedTuple):
    invalid: type[InvalidRequestError]
    too_large: type[InvalidRequestError]
    example: str
    """Beginning of a data URL, for errors."""


KINDS: dict[MediaKind, _Kind] = {
    "image": _Kind(InvalidImageError, ImageTooLargeError, "data:image/png"),
    "video": _Kind(InvalidVideoError, VideoTooLargeError, "data:video/mp4"),
    "document": _Kind(InvalidDocumentError, DocumentTooLargeError, "data:application/pdf"),
}


def max_bytes(limits: MediaConfig, kind: MediaKind) -> int:
    """The largest size of a file."""
    sizes = {
        "image": limits.max_image_bytes,
        "video": limits.max_video_bytes,
        "document": limits.max_document_bytes,
    }
    return sizes[kind]


def check_num_bytes(size: int, limits: MediaConfig, kind: MediaKind = "image") -> None:
    """Raises the kind's `too_large` error if a file of `size` bytes is over the limit."""
    if size > (most := max_bytes(limits, kind)):
        raise KINDS[kind].too_large(f"the {kind}'s file has {size:,} bytes; at most {most:,} are allowed")
