"""Errors, size limits and example data URLs of images, videos and documents."""

from __future__ import annotations

from typing import NamedTuple

from vlmserve.errors import (
    DocumentTooLargeError,
    ImageTooLargeError,
    InvalidDocumentError,
    InvalidImageError,
    InvalidRequestError,
    InvalidVideoError,
    VideoTooLargeError,
)
from vlmserve.settings.config import MediaConfig
from vlmserve.types import MediaKind


class _Kind(NamedTuple):
    invalid: type[InvalidRequestError]
    too_large: type[InvalidRequestError]
    example: str
    """Start of a data URL, for errors."""


KINDS: dict[MediaKind, _Kind] = {
    "image": _Kind(InvalidImageError, ImageTooLargeError, "data:image/png"),
    "video": _Kind(InvalidVideoError, VideoTooLargeError, "data:video/mp4"),
    "document": _Kind(InvalidDocumentError, DocumentTooLargeError, "data:application/pdf"),
}


def max_bytes(limits: MediaConfig, kind: MediaKind) -> int:
    sizes = {
        "image": limits.max_image_bytes,
        "video": limits.max_video_bytes,
        "document": limits.max_document_bytes,
    }
    return sizes[kind]


def check_num_bytes(size: int, limits: MediaConfig, kind: MediaKind = "image") -> None:
    if size > (most := max_bytes(limits, kind)):
        raise KINDS[kind].too_large(f"the {kind}'s file has {size:,} bytes; at most {most:,} are allowed")
