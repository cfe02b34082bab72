"""Small images of a document's pages."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from tests.media.documents_for_tests import encrypted, page, pdf_file, square
from tests.media.test_documents import multi_page
from vlmserve.errors import DocumentTooLargeError, InvalidDocumentError, VLMServeError
from vlmserve.media.decoding import DecodingMemory
from vlmserve.media.previews import Preview, preview_pages
from vlmserve.settings.config import MediaConfig

LIMITS = MediaConfig(max_document_pages=3)
COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)]
PDF = pdf_file([page(square(" ".join(str(level // 255) for level in colour), 600)) for colour in COLOURS])
MOST_PIXELS = 120_000


def previews(data: bytes, pages: str | None = None) -> tuple[int, list[Preview]]:
    return preview_pages(data, pages, LIMITS, DecodingMemory(2**28, 1))


def colour_of(preview: Preview) -> tuple[int, ...]:
    """The colour of the lower left quarter."""
    image = Image.open(io.BytesIO(preview.jpeg))
    assert (image.format, image.size) == ("JPEG", (preview.width, preview.height))
    return tuple(np.asarray(image)[-image.height // 4 :, : image.width // 4].mean((0, 1)).round().astype(int))


@pytest.mark.parametrize(
    "data",
    [PDF, multi_page([Image.new("RGB", (1700, 2200), colour) for colour in COLOURS], "TIFF")],
    ids=["pdf", "tiff"],
)
def test_chosen_pages_are_small_and_numbered(data: bytes) -> None:
    count, shown = previews(data, "2-3,1")
    assert (count, [one.number for one in shown]) == (4, [2, 3, 1])
    assert [colour_of(one) for one in shown] == [pytest.approx(COLOURS[index], abs=3) for index in (1, 2, 0)]
    for one in shown:
        assert 0.9 * MOST_PIXELS < one.width * one.height <= MOST_PIXELS
        assert one.width / one.height == pytest.approx(8.5 / 11, abs=0.01)


def test_small_image_keeps_its_size() -> None:
    count, [shown] = previews(multi_page([Image.new("RGBA", (40, 30), (255, 0, 0, 0))], "PNG"))
    assert (count, shown.width, shown.height, colour_of(shown)) == (1, 40, 30, (255, 255, 255))


@pytest.mark.parametrize(
    ("data", "pages", "error"),
    [
        (PDF, None, DocumentTooLargeError),
        (PDF, "5", InvalidDocumentError),
        (PDF, "x", InvalidDocumentError),
        (PDF[:200], "1", InvalidDocumentError),
        (encrypted(), "1", InvalidDocumentError),
        (b"text", "1", InvalidDocumentError),
    ],
)
def test_invalid_pages_and_documents_fail(data: bytes, pages: str | None, error: type[VLMServeError]) -> None:
    with pytest.raises(error):
        previews(data, pages)
