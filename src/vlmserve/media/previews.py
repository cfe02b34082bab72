"""Small images of a document's pages, for people."""

from __future__ import annotations

import contextlib
import io
from typing import NamedTuple

from PIL import Image

from vlmserve.media.decoding import DecodingMemory
from vlmserve.media.documents import open_document, page_numbers, parse_pages
from vlmserve.media.paged_images import PagedImage
from vlmserve.media.pdf import PDFProcess
from vlmserve.media.processor import to_rgb
from vlmserve.settings.config import MediaConfig

_PIXELS = 120_000
"""Maximum pixels of a preview."""
_QUALITY = 80


class Preview(NamedTuple):
    number: int
    """Counted from 1."""
    width: int
    height: int
    jpeg: bytes


def preview_pages(
    data: bytes, pages: str | None, limits: MediaConfig, memory: DecodingMemory
) -> tuple[int, list[Preview]]:
    """Returns also the document's number of pages.

    pages: as in `parse_pages`; None: all. Raises as `DocumentReader.pages` does, and InvalidImageError or
    ImageTooLargeError for a page.
    """
    ranges = None if pages is None else parse_pages(pages)
    with contextlib.closing(open_document(data, limits.model_copy(update={"max_page_pixels": _PIXELS}))) as document:
        numbers = page_numbers(ranges, document.num_pages, limits.max_document_pages)
        return document.num_pages, [_preview(document, number, memory) for number in numbers]


def _preview(document: PDFProcess | PagedImage, number: int, memory: DecodingMemory) -> Preview:
    if isinstance(document, PDFProcess):
        with document.rendered(number, memory) as image:
            return _encoded(number, image)
    with document.decoded(number, memory) as decoded:
        return _encoded(number, to_rgb(decoded.image))


def _encoded(number: int, image: Image.Image) -> Preview:
    share = min(1.0, (_PIXELS / (image.width * image.height)) ** 0.5)
    if share < 1:
        image = image.resize((max(1, int(image.width * share)), max(1, int(image.height * share))), reducing_gap=2.0)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=_QUALITY)
    return Preview(number + 1, image.width, image.height, file.getvalue())
