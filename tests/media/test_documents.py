"""Documents as images of their pages: which are shown, what they look like, and that each is rendered once."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, TiffImagePlugin

from tests.media.documents_for_tests import page, pdf_file, slow, square
from tests.media.images_for_tests import encoded, noise
from tests.rendering import page_image
from vlmserve.errors import (
    DocumentTooLargeError,
    ImageTooLargeError,
    InvalidDocumentError,
    InvalidImageError,
    InvalidRequestError,
)
from vlmserve.media.cache import ImageCache
from vlmserve.media.documents import DocumentReader, Page, PageCounts, count_pages, parse_pages
from vlmserve.media.dynamic_resolution import DynamicResolutionProcessor
from vlmserve.media.images import decode_image
from vlmserve.media.pdf import PDFProcess
from vlmserve.media.sources import prepare_image
from vlmserve.settings.config import MediaConfig
from vlmserve.types import ImageInput

PROCESSOR = DynamicResolutionProcessor.from_settings(
    {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 256, "longest_edge": 40_000}}, exact_pixels=True
)
LIMITS = MediaConfig(page_dpi=36)
COLOURS = ["1 0 0", "0 1 0", "0 0 1", "1 1 0"]
PDF = pdf_file([page(square(colour, 50 + 50 * index)) for index, colour in enumerate(COLOURS)])


class Reading:
    """What one server reads, with its caches."""

    def __init__(self, **limits: Any) -> None:
        self.limits = LIMITS.model_copy(update=limits)
        self.counts = PageCounts()
        self.cache = ImageCache(2**26)

    def images(self, data: Any, chosen: str | None = None, most: int = 100, salt: str = "") -> list[ImageInput]:
        with contextlib.closing(DocumentReader(self.limits, self.counts, salt)) as reader:
            return [
                shown.prepare(PROCESSOR, self.cache)
                if isinstance(shown, Page)
                else prepare_image(shown, PROCESSOR, self.limits, self.cache, salt=salt)
                for shown in reader.pages(data, chosen, most)
            ]


def as_shown(image: Image.Image) -> np.ndarray:
    return prepare_image(image, PROCESSOR, MediaConfig(), ImageCache(0)).pixels


def pages_as_images(data: bytes, limits: MediaConfig = LIMITS) -> list[Image.Image]:
    with contextlib.closing(PDFProcess(data, limits)) as process:
        return [page_image(process, number) for number in range(process.num_pages)]


def multi_page(images: list[Image.Image], format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    images[0].save(file, format, save_all=True, append_images=images[1:], **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("text", "ranges"),
    [
        ("1", [(1, 1)]),
        ("1-3,7", [(1, 3), (7, 7)]),
        (" 10- , 2 ", [(10, None), (2, 2)]),
    ],
)
def test_pages_are_chosen_by_ranges(text: str, ranges: list[tuple[int, int | None]]) -> None:
    assert parse_pages(text) == ranges


@pytest.mark.parametrize("text", ["", "0", "-1", "3-2", "a", "1,,2", "1-2-3", "1.5", "1;2", "9" * 20, "1," * 5000])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(InvalidDocumentError, match="pages must be like"):
        parse_pages(text)


def test_pages_become_images_in_chosen_order() -> None:
    expected = [as_shown(image) for image in pages_as_images(PDF)]
    for chosen, numbers in ((None, [0, 1, 2, 3]), ("2-3", [1, 2]), ("4,1", [3, 0]), ("3-", [2, 3]), ("2,2", [1, 1])):
        shown = Reading().images(PDF, chosen)
        assert len(shown) == len(numbers)
        for image, number in zip(shown, numbers, strict=True):
            assert np.array_equal(image.pixels, expected[number])


def test_each_page_is_rendered_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[int] = []
    start = PDFProcess.__init__

    def counted(self: PDFProcess, data: bytes, limits: MediaConfig) -> None:
        started.append(len(data))
        start(self, data, limits)

    monkeypatch.setattr(PDFProcess, "__init__", counted)
    reading = Reading()
    first = reading.images(PDF, "1-2")
    (tmp_path / "a.pdf").write_bytes(PDF)
    again = reading.images(tmp_path / "a.pdf", "2,1")
    assert len(started) == 1
    assert [image.key for image in again] == [first[1].key, first[0].key]
    assert reading.cache.stats().misses == 2
    reading.images(PDF)
    assert len(started) == 2
    assert reading.cache.stats().misses == 4


def test_cache_key_covers_pixels_and_salt() -> None:
    reading = Reading()
    keys = {reading.images(PDF, "1")[0].key, reading.images(PDF, "1", salt="a")[0].key}
    keys |= {image.key for image in reading.images(PDF, "2-")}
    keys.add(reading.images(PDF + b"\n", "1")[0].key)
    keys.add(Reading(page_dpi=72).images(PDF, "1")[0].key)
    keys.add(Reading(max_page_pixels=9999).images(PDF, "1")[0].key)
    assert len(keys) == 8


@pytest.mark.parametrize(
    ("chosen", "error", "message"),
    [
        ("5", InvalidDocumentError, "no page 5: the document has 4"),
        ("1-999999999", InvalidDocumentError, "no page 999,999,999"),
        ("5-", InvalidDocumentError, "no page 5"),
        (None, DocumentTooLargeError, r'has 4 pages.*3 left.*--max-document-pages.*"pages": "1-3,7"'),
        ("1-2,3-4", DocumentTooLargeError, "--max-document-pages"),
    ],
)
def test_pages_that_cannot_be_shown_are_refused(
    chosen: str | None, error: type[InvalidRequestError], message: str
) -> None:
    with pytest.raises(error, match=message):
        Reading().images(PDF, chosen, most=3)


def test_an_error_says_which_page_it_is_about() -> None:
    good = page(square("1 0 0"))
    broken = pdf_file([good, good]).replace(b"<</Type/Page/Parent 2 0 R", b"<</Type/Pgae/Parent 2 0", 2)
    reading = Reading(document_timeout=1)
    with pytest.raises(InvalidRequestError, match=r"^page 1: "):
        reading.images(broken)
    with pytest.raises(DocumentTooLargeError, match=r"^page 1: the document takes longer than 1 s"):
        reading.images(slow())
    assert len(reading.images(PDF)) == 4


@pytest.mark.parametrize("compression", ["raw", "tiff_lzw", "tiff_adobe_deflate", "group4"])
def test_pages_of_a_tiff_are_images(compression: str) -> None:
    mode = "1" if compression == "group4" else "RGB"
    images = [noise(60 + 8 * number, 40, seed=number).convert(mode) for number in range(3)]
    data = multi_page(images, "TIFF", compression=compression)
    shown = Reading().images(data)
    assert [np.array_equal(one.pixels, as_shown(image)) for one, image in zip(shown, images, strict=True)] == [True] * 3
    assert np.array_equal(Reading().images(data, "2")[0].pixels, shown[1].pixels)


def test_each_tiff_page_keeps_its_orientation() -> None:
    images = [noise(60, 40, seed=number) for number in range(2)]
    file = io.BytesIO()
    with TiffImagePlugin.AppendingTiffWriter(file, True) as writer:
        for orientation, image in zip((1, 6), images, strict=True):
            image.save(writer, "TIFF", tiffinfo={0x0112: orientation})
            writer.newFrame()
    first, second = Reading().images(file.getvalue())
    assert np.array_equal(first.pixels, as_shown(images[0]))
    assert np.array_equal(second.pixels, as_shown(images[1].transpose(Image.Transpose.ROTATE_270)))


@pytest.mark.parametrize(("format", "options"), [("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {})])
def test_frames_of_an_animation_are_images(format: str, options: dict[str, Any]) -> None:
    colours = ["red", "green", "blue", "yellow"]
    images = [Image.new("RGB", (40, 32), colour) for colour in colours]
    shown = Reading().images(multi_page(images, format, **options), "4,1-2")
    for one, index in zip(shown, (3, 0, 1), strict=True):
        assert np.array_equal(one.pixels, as_shown(images[index]))


def test_a_document_of_one_image_is_that_image() -> None:
    data = encoded(noise(40, 30))
    reading = Reading()
    (shown,) = reading.images(data)
    image = prepare_image(data, PROCESSOR, LIMITS, reading.cache)
    assert shown.key == image.key
    assert reading.cache.stats().misses == 1
    with pytest.raises(InvalidDocumentError, match="no page 2"):
        reading.images(data, "2")


def test_limits_hold_for_each_image_page() -> None:
    data = multi_page([noise(20, 20), noise(200, 200)], "TIFF")
    assert len(Reading(max_image_pixels=400).images(data, "1")) == 1
    with pytest.raises(ImageTooLargeError, match="page 2: the image has 200 x 200 pixels"):
        Reading(max_image_pixels=400).images(data, "2")
    with pytest.raises(DocumentTooLargeError, match="the document's file has"):
        Reading(max_document_bytes=len(data) - 1).images(data)
    frames = multi_page([Image.new("L", (1, 1), number % 256) for number in range(50)], "TIFF")
    with pytest.raises(DocumentTooLargeError, match="more than 20 pages or frames"):
        Reading(max_decoded_frames=20).images(frames, "1")


@pytest.mark.parametrize("format", ["TIFF", "GIF", "WEBP"])
def test_broken_image_files_are_refused_kindly(format: str) -> None:
    data = multi_page([noise(40, 30, seed=number) for number in range(3)], format)
    reading = Reading()
    refused = 0
    for end in range(1, len(data), max(1, len(data) // 40)):
        try:
            reading.images(data[:end])
        except InvalidRequestError as error:
            assert error.code in ("invalid_document", "invalid_image", "document_too_large")  # noqa: PT017
            refused += 1
    assert refused >= 20


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"plain text", "documents are PDF files"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG drawing"),
        (b"PK\x03\x04word/document.xml", "documents are PDF files"),
        (b"\0\0\0\x18ftypmp42" + b"\0" * 100, "video, not a document; send it as a video_url"),
        ("data:text/plain;base64,eA==", "documents are PDF files"),
        ("/nowhere/a.pdf", "there is no file"),
        ("http://127.0.0.1/a.pdf", "not a public address"),
    ],
)
def test_what_is_no_document_is_refused(data: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        Reading().images(data)


def test_pages_are_counted_without_being_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PDFProcess, "rendered", None)
    assert count_pages(PDF, LIMITS) == 4
    assert count_pages(multi_page([noise(9, 9)] * 5, "TIFF"), LIMITS) == 5


def test_what_is_no_image_says_what_it_is() -> None:
    with pytest.raises(InvalidImageError, match='PDF document, not an image; send it as a part of type "file"'):
        decode_image(PDF, LIMITS)
    with pytest.raises(InvalidImageError, match="SVG drawing"):
        decode_image(b"<?xml version='1.0'?><svg/>", LIMITS)
