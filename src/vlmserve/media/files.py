"""Detects the type of a file from its content."""

from __future__ import annotations

import contextlib

from vlmserve.errors import InvalidImageError
from vlmserve.media.images import open_any
from vlmserve.media.kinds import check_num_bytes
from vlmserve.media.pages import has_several
from vlmserve.media.pdf import is_pdf
from vlmserve.media.video_files import container_of
from vlmserve.settings.config import MediaConfig

_VIDEOS = {"mov": "video/mp4", "matroska": "video/webm", "avi": "video/x-msvideo"}


def media_type_of(data: bytes, limits: MediaConfig) -> str:
    """Reads only headers. Raises InvalidImageError for other files, and the kind's error above the limits."""
    if is_pdf(data):
        check_num_bytes(len(data), limits, "document")
        return "application/pdf"
    container = container_of(data)
    if container is not None:
        check_num_bytes(len(data), limits, "video")
        return _VIDEOS[container]
    try:
        with contextlib.closing(open_any(data, limits)) as image:
            return f"image/{(image.format or '').lower()}"
    except InvalidImageError as error:
        raise InvalidImageError(
            f"{error}; documents are PDF files, videos MP4, MOV, WebM, Matroska or AVI files"
        ) from error


def is_document(data: bytes, limits: MediaConfig) -> bool:
    """True for a PDF, a TIFF with several pages, or an animation. Raises InvalidImageError for a TIFF with broken
    pages."""
    if is_pdf(data) or container_of(data) is not None:
        return is_pdf(data)
    with contextlib.closing(open_any(data, limits)) as image:
        return has_several(image)
