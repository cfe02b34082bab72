"""Turns documents into page images: PDF files, TIFF pages, frames of animations."""

from __future__ import annotations

import contextlib
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from blake3 import blake3

from vlmserve.errors import DocumentTooLargeError, InvalidDocumentError, InvalidImageError, InvalidRequestError
from vlmserve.media.cache import ImageCache
from vlmserve.media.decoding import DecodingMemory
from vlmserve.media.images import DecodedImage
from vlmserve.media.keys import page_key
from vlmserve.media.paged_images import PagedImage
from vlmserve.media.pdf import PDFProcess, is_pdf
from vlmserve.media.processor import ImageProcessor
from vlmserve.media.sources import DocumentSource, process_image, read_source
from vlmserve.media.video_files import container_of
from vlmserve.settings.config import MediaConfig
from vlmserve.types import ImageInput

_RANGE = re.compile(r"(\d{1,9})(?:-(\d{0,9}))?")
_MAX_RANGES = 1000
_COUNTS = 4096
"""Maximum documents with a remembered number of pages."""


class _Open(Protocol):
    num_pages: int

    def close(self) -> None: ...


class PageCounts:
    """An LRU cache. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def get(self, digest: bytes) -> int | None:
        with self._lock:
            count = self._counts.get(digest)
            if count is not None:
                self._counts.move_to_end(digest)
            return count

    def keep(self, digest: bytes, count: int) -> None:
        with self._lock:
            self._counts[digest] = count
            while len(self._counts) > _COUNTS:
                self._counts.popitem(last=False)


@dataclass(frozen=True)
class Page:
    reader: DocumentReader = field(repr=False, compare=False)
    data: bytes = field(repr=False, compare=False)
    digest: bytes
    """Digest of document and salt."""
    number: int
    """Counted from 0."""

    def prepare(self, processor: ImageProcessor, cache: ImageCache) -> ImageInput:
        """Raises InvalidDocumentError, InvalidImageError, DocumentTooLargeError or ImageTooLargeError with the page's
        number, and CancelledWorkError."""
        key = page_key(self.digest, self.number, self.reader.look, processor.fingerprint)

        def prepare() -> ImageInput:
            with self.reader.rendered(self, cache.decoding) as image:
                return process_image(key, image, processor)

        try:
            return cache.get(key, prepare)
        except InvalidRequestError as error:
            error.args = (f"page {self.number + 1}: {error}",)
            raise


Shown: TypeAlias = Page | bytes
"""A page, or the file of a document that is one image."""


class _Read(NamedTuple):
    source: DocumentSource
    data: bytes
    digest: bytes
    num_pages: int


class DocumentReader:
    """Opens one document at a time, with at most one rendering process. Close it at the end."""

    def __init__(self, limits: MediaConfig, counts: PageCounts, salt: str = "") -> None:
        self.look = f"{limits.page_dpi!r} {limits.max_page_pixels}".encode()
        """Settings that determine the rendering."""
        self._limits = limits
        self._counts = counts
        self._salt = salt.encode()
        self._opened: tuple[bytes, _Open] | None = None
        self._read: dict[object, _Read] = {}

    def pages(self, source: DocumentSource, chosen: str | None, most: int) -> list[Shown]:
        """Pages in the chosen order, not yet rendered; all if `chosen` is None (`parse_pages`). Trusts `source`: reads
        paths.

        Raises InvalidDocumentError for other files and missing pages, DocumentTooLargeError above a limit, and as
        `read_source` and `PDFProcess` do.
        """
        ranges = None if chosen is None else parse_pages(chosen)
        _, data, digest, count = self._counted(source)
        numbers = page_numbers(ranges, count, most)
        if count == 1 and not is_pdf(data):
            return [data for _ in numbers]
        return [Page(self, data, digest, number) for number in numbers]

    def count(self, source: DocumentSource) -> int:
        return self._counted(source).num_pages

    @contextlib.contextmanager
    def rendered(self, page: Page, memory: DecodingMemory) -> Iterator[DecodedImage]:
        document = self._open(page.digest, page.data)
        if isinstance(document, PagedImage):
            with document.decoded(page.number, memory) as image:
                yield image
            return
        assert isinstance(document, PDFProcess)
        try:
            with document.rendered(page.number, memory) as image:
                yield DecodedImage.whole(image)
        except BaseException:
            self.close()  # the process may have ended
            raise

    def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened[1].close()

    def forget(self) -> None:
        self._read.clear()

    def _counted(self, source: DocumentSource) -> _Read:
        key = source if isinstance(source, str) else id(source)
        if key not in self._read:
            self._read[key] = self._counted_again(source)
        return self._read[key]

    def _counted_again(self, source: DocumentSource) -> _Read:
        data = read_source(source, self._limits, "document")
        if not data:
            raise InvalidDocumentError("the document is empty (0 bytes)")
        digest = blake3(len(self._salt).to_bytes(8, "little") + self._salt).update(data).digest()
        count = self._counts.get(digest)
        if count is None:
            count = self._open(digest, data).num_pages
            self._counts.keep(digest, count)
        return _Read(source, data, digest, count)

    def _open(self, digest: bytes, data: bytes) -> _Open:
        if self._opened is not None and self._opened[0] == digest:
            return self._opened[1]
        self.close()
        document = open_document(data, self._limits)
        self._opened = digest, document
        return document


def open_document(data: bytes, limits: MediaConfig) -> PDFProcess | PagedImage:
    """Raises InvalidDocumentError for other files, and as `PDFProcess` and `PagedImage` do. The caller closes it."""
    if is_pdf(data):
        return PDFProcess(data, limits)
    if container_of(data) is not None:
        raise InvalidDocumentError("the file is a video, not a document; send it as a video_url")
    try:
        return PagedImage(data, limits)
    except InvalidImageError as error:
        raise InvalidDocumentError(f"{error}; documents are PDF files, TIFF files and other images") from error


def count_pages(source: DocumentSource, limits: MediaConfig) -> int:
    with contextlib.closing(DocumentReader(limits, PageCounts())) as reader:
        return reader.count(source)


def parse_pages(text: str) -> list[tuple[int, int | None]]:
    """``1-3,7,10-`` means pages 1 to 3, 7, and 10 to the last (None). Raises InvalidDocumentError for other text."""
    ranges: list[tuple[int, int | None]] = []
    for piece in text.split(",", _MAX_RANGES):
        match = _RANGE.fullmatch(piece.strip())
        first = 0 if match is None else int(match[1])
        last = None if match is None or match[2] == "" else int(match[2] or first)
        if first < 1 or (last is not None and last < first):
            raise InvalidDocumentError(f"pages must be like 1-3,7,10- and count from 1, not {text!r:.100}")
        ranges.append((first, last))
    return ranges


def page_numbers(ranges: list[tuple[int, int | None]] | None, count: int, most: int) -> list[int]:
    """Numbers from 0.

    Raises InvalidDocumentError for missing pages, DocumentTooLargeError for more than `most`.
    """
    numbers: list[int] = []
    for first, last in [(1, None)] if ranges is None else ranges:
        if max(first, last or first) > count:
            raise InvalidDocumentError(f"there is no page {max(first, last or first):,}: the document has {count:,}")
        wanted = range(first - 1, last or count)
        if len(numbers) + len(wanted) > most:
            raise DocumentTooLargeError(
                f"the document has {count:,} pages; the request has {most:,} left (--max-document-pages); "
                'choose fewer, like "pages": "1-3,7"'
            )
        numbers += wanted
    return numbers
