"""PDF files to images of pages, through PDFium (pypdfium2, the extra ``documents``) in a process for each file."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import msgspec
from PIL import Image

from vlmserve.cancellation import check_cancelled
from vlmserve.config import MediaConfig
from vlmserve.errors import DocumentTooLargeError, InvalidDocumentError, VLMServeError

_COMMAND = [sys.executable, "-I", "-S", "-u", str(Path(__file__).with_name("pdf_worker.py"))]
"""Isolated and without site packages of its own: it imports from where this process does."""
_POLL_INTERVAL = 0.05
"""Seconds between checks whether anybody still waits for the pages."""
_CHUNK = 1024**2
_LONGEST_LINE = 4096
_LONGEST_SIDE = 30_000
"""Pixels of a page that is a line."""
_INHERITED = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")
"""Of the environment, all that the process gets: keys and passwords are none of its business."""


def is_pdf(data: bytes) -> bool:
    """Whether a file says so of itself; something may stand before it."""
    return b"%PDF-" in data[:1024]


class _Answer(msgspec.Struct):
    pages: int = 0
    width: int = 0
    height: int = 0
    error: str | None = None


class PDFProcess:
    """A PDF that is open in a process of its own, which has bounded memory and time.

    Raises InvalidDocumentError for a file that cannot be opened, is encrypted or has no pages, and where PDFium is not
    installed; DocumentTooLargeError if that takes too much memory or time; CancelledWorkError.
    """

    def __init__(self, data: bytes, limits: MediaConfig) -> None:
        self._limits = limits
        self._seconds_left = limits.document_timeout
        self._process = subprocess.Popen(
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            env={name: os.environ[name] for name in _INHERITED if name in os.environ},
            start_new_session=True,
        )
        try:
            for pipe in (self._stdin, self._stdout):
                os.set_blocking(pipe.fileno(), False)
            self._received = bytearray()
            self._write(json.dumps(self._settings(len(data))).encode() + b"\n")
            self._answer()
            self._write(data)
            self.num_pages = self._answer().pages
            if not 1 <= self.num_pages <= len(data):
                raise InvalidDocumentError("the document has no pages, or more than its file can hold")
        except BaseException:
            self.close()
            raise

    def render(self, number: int) -> Image.Image:
        """The page with that number, from 0, in RGB. Raises as opening does; then the process has ended."""
        try:
            self._write(f"{number}\n".encode())
            size = self._answer()
            width, height = size.width, size.height
            if min(width, height) < 1 or width * height > max(self._limits.max_page_pixels, _LONGEST_SIDE):
                raise _error("broken", self._limits)
            pixels = self._read(width * height * 3)
        except BaseException:
            self.close()
            raise
        return Image.frombuffer("RGB", (width, height), pixels, "raw", "RGB", 0, 1)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._stdin, self._stdout):
            pipe.close()

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def _stdout(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def _settings(self, num_bytes: int) -> dict[str, Any]:
        return {
            "num_bytes": num_bytes,
            "sys_path": [os.path.abspath(entry) for entry in sys.path],
            "memory": self._limits.document_memory,
            "seconds": math.ceil(self._limits.document_timeout) + 1,
            "dpi": self._limits.page_dpi,
            "max_pixels": self._limits.max_page_pixels,
        }

    def _answer(self) -> _Answer:
        """The next line that the process writes."""
        while b"\n" not in self._received:
            if len(self._received) > _LONGEST_LINE:
                raise _error("broken", self._limits)
            self._receive(_LONGEST_LINE)
        line, _, rest = self._received.partition(b"\n")
        self._received = rest
        try:
            answer = msgspec.json.decode(line, type=_Answer)
        except msgspec.DecodeError as error:
            raise _error("broken", self._limits) from error
        if answer.error is not None:
            raise _error(answer.error, self._limits)
        return answer

    def _read(self, size: int) -> bytes:
        while len(self._received) < size:
            self._receive(min(size - len(self._received), _CHUNK))
        pixels = bytes(memoryview(self._received)[:size])
        del self._received[:size]
        return pixels

    def _receive(self, most: int) -> None:
        self._wait(self._stdout, select.POLLIN)
        received = os.read(self._stdout.fileno(), most)
        if not received:
            raise self._ended()
        self._received += received

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            self._wait(self._stdin, select.POLLOUT)
            try:
                view = view[os.write(self._stdin.fileno(), view[:_CHUNK]) :]
            except BrokenPipeError:
                raise self._ended() from None

    def _wait(self, pipe: IO[bytes], event: int) -> None:
        """Until a pipe is ready for it. What it takes comes off the time that is left."""
        poll = select.poll()
        poll.register(pipe.fileno(), event)
        began = time.monotonic()
        while not poll.poll(_POLL_INTERVAL * 1000):
            check_cancelled()
            if time.monotonic() - began > self._seconds_left:
                raise _too_slow(self._limits)
        self._seconds_left -= time.monotonic() - began
        check_cancelled()

    def _ended(self) -> VLMServeError:
        """What it means that the process ended by itself."""
        if self._process.wait() in (-signal.SIGXCPU, -signal.SIGKILL):  # the soft and the hard limit of time
            return _too_slow(self._limits)
        return _error("memory", self._limits)


def _too_slow(limits: MediaConfig) -> DocumentTooLargeError:
    return DocumentTooLargeError(
        f"the document takes longer than {limits.document_timeout:g} s to render; choose fewer of its pages"
    )


def _error(reason: str, limits: MediaConfig) -> VLMServeError:
    match reason:
        case "missing":
            return InvalidDocumentError(
                "PDF files are not read here; install vlmserve with the extra [documents], or send images of the pages"
            )
        case "encrypted":
            return InvalidDocumentError("the document is encrypted; save it without a password")
        case "memory":
            return DocumentTooLargeError(
                f"the document is broken, or takes more than {limits.document_memory:,} bytes of memory to render"
            )
        case "size":
            return InvalidDocumentError("the page has no size")
    return InvalidDocumentError("the document is broken or truncated")
