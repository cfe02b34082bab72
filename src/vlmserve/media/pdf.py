"""Render PDF pages with PDFium (pypdfium2) in a process for each file."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from functools import partial

from PIL import Image

from vlmserve.errors import DocumentTooLargeError, InvalidDocumentError, VLMServeError
from vlmserve.media.decoding import DecodingMemory, frame_bytes
from vlmserve.media.isolated import Answer, IsolatedProcess
from vlmserve.settings.config import MediaConfig

_LONGEST_SIDE = 30_000
"""Maximum pixels of a page that is a single row or column."""


def is_pdf(data: bytes) -> bool:
    """Other bytes may precede the signature."""
    return b"%PDF-" in data[:1024]


class _Opened(Answer):
    pages: int = 0


class _Page(Answer):
    width: int = 0
    height: int = 0


class PDFProcess:
    """A PDF in a process with limited memory and time.

    Raises InvalidDocumentError if the file is broken, encrypted or empty, or PDFium is missing; DocumentTooLargeError
    for too much memory or time; CancelledWorkError.
    """

    def __init__(self, data: bytes, limits: MediaConfig) -> None:
        self._limits = limits
        self.process = IsolatedProcess("pdf", limits.document_timeout, partial(_error_of, limits))
        settings = {
            "memory": limits.document_memory,
            "seconds": math.ceil(limits.document_timeout) + 1,
            "dpi": limits.page_dpi,
            "max_pixels": limits.max_page_pixels,
        }
        try:
            self.num_pages = self.process.open(data, settings, _Opened).pages
            if not 1 <= self.num_pages <= len(data):
                raise InvalidDocumentError("the document has no pages, or more than its file can hold")
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def rendered(self, number: int, memory: DecodingMemory) -> Iterator[Image.Image]:
        """A page, from 0, in RGB takes memory during the block. An error ends the process. Raises as the constructor
        does."""
        try:
            page = self.process.ask(str(number), _Page)
            width, height = page.width, page.height
            if min(width, height) < 1 or width * height > max(self._limits.max_page_pixels, _LONGEST_SIDE):
                raise _error_of(self._limits, "broken", "")
            with memory.share(frame_bytes(width * height)):
                pixels = self.process.read(width * height * 3)
                yield Image.frombuffer("RGB", (width, height), pixels, "raw", "RGB", 0, 1)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.process.close()


def _error_of(limits: MediaConfig, reason: str, _: str) -> VLMServeError:
    match reason:
        case "missing":
            return InvalidDocumentError(
                "reading PDF files needs pypdfium2: pip install pypdfium2, or send images of the pages"
            )
        case "encrypted":
            return InvalidDocumentError("the document is encrypted; save it without a password")
        case "slow":
            return DocumentTooLargeError(
                f"the document takes longer than {limits.document_timeout:g} s to render (--document-timeout); "
                "choose fewer of its pages"
            )
        case "memory":
            return DocumentTooLargeError(
                f"the document takes more than {limits.document_memory:,} bytes of memory to render (--document-memory)"
            )
        case "aborted":
            return DocumentTooLargeError(
                "the program that renders PDF files aborted: the document is broken, or takes more than "
                f"{limits.document_memory:,} bytes of memory (--document-memory)"
            )
        case "crash":
            return InvalidDocumentError("the document is broken: it crashed the process that rendered it")
        case "killed":
            return InvalidDocumentError(
                "the process that rendered the document was killed, perhaps for lack of memory; choose fewer pages"
            )
        case "size":
            return InvalidDocumentError("the page has no size")
    return InvalidDocumentError("the document is broken or truncated")
