"""PDF files become images in a process of their own, whatever is in them."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from tests.media.documents_for_tests import (
    LETTER,
    bomb,
    claims,
    cyclic,
    encrypted,
    exponential,
    page,
    pdf_file,
    recursive,
    slow,
    square,
)
from tests.rendering import captured, page_image, rendering
from vlmserve import cancellation
from vlmserve.errors import CancelledWorkError, DocumentTooLargeError, InvalidDocumentError, InvalidRequestError
from vlmserve.media import fork_server, isolated
from vlmserve.media.isolated import Answer, IsolatedProcess
from vlmserve.media.pdf import PDFProcess
from vlmserve.settings.config import MediaConfig

LIMITS = MediaConfig()
GOOD = pdf_file([page(square("1 0 0")), page(square("0 0 1"), (100, 400)), page(square("0 1 0", 9000))])


def rendered(data: bytes, number: int = 0, **limits: Any) -> np.ndarray:
    process = PDFProcess(data, MediaConfig(**limits))
    try:
        return np.asarray(page_image(process, number))
    finally:
        process.close()


def test_pages_render_at_the_set_resolution() -> None:
    first = rendered(GOOD, page_dpi=144)
    assert first.shape == (2 * LETTER[1], 2 * LETTER[0], 3)
    assert (first[-195:, :195] == (255, 0, 0)).all()
    assert (first[:-205] == 255).all()
    assert (first[:, 205:] == 255).all()
    assert rendered(GOOD, 1, page_dpi=72).shape == (400, 100, 3)
    assert (rendered(GOOD, 2, page_dpi=36) == (0, 255, 0)).all()


def test_rows_that_pdfium_pads_come_without_padding() -> None:
    data = pdf_file([page(square("0 0 1", 40), (41, 40))])
    drawn = rendered(data, page_dpi=72)
    assert drawn.shape == (40, 41, 3)
    assert (drawn[1:-1, 1:39] == (0, 0, 255)).all()


@pytest.mark.parametrize("size", [(14400, 14400), (20000, 100), (1, 9000), (90_000_000, 90_000_000), (0.001, 0.001)])
def test_large_pages_are_drawn_smaller(size: tuple[float, float]) -> None:
    height, width, _ = rendered(pdf_file([page(square("1 0 0"), size)]), max_page_pixels=50_000).shape
    assert width * height <= 50_000
    assert width >= 1 <= height


def test_a_turned_page_is_upright() -> None:
    drawn = rendered(pdf_file([page(square("1 0 0"), (100, 200), more=b"/Rotate 90")]), page_dpi=72)
    assert drawn.shape == (100, 200, 3)
    assert (drawn[2:98, 2:98] == (255, 0, 0)).all()


def test_what_stands_before_a_file_does_not_matter() -> None:
    assert rendered(b"\n" * 500 + GOOD, page_dpi=72).shape == (792, 612, 3)


def broken_files() -> dict[str, bytes]:
    """By name, files that cannot be shown: truncated, garbled, and wrong in every way that there is a name for."""
    chance = random.Random(3)
    good = pdf_file([page(square("1 0 0"))])
    files = {f"cut at {end}": good[:end] for end in range(8, len(good) - 60, 6)}
    files |= {f"cut front {start}": b"%PDF-1.7\n" + good[start:] for start in range(60, len(good), 12)}
    for seed in range(120):
        garbled = bytearray(good)
        for _ in range(1 + seed // 8):
            garbled[chance.randrange(9, len(good))] = chance.randrange(256)
        files[f"garbled {seed}"] = bytes(garbled)
    for seed in range(40):
        files[f"noise {seed}"] = b"%PDF-1.7\n" + chance.randbytes(chance.randrange(2000))
    names = (b"/Pages", b"/Kids", b"/Count", b"/MediaBox", b"/Root", b"/Size", b"xref", b"obj", b"stream", b"/Type")
    for name in names:
        files[f"without {name!r}"] = good.replace(name, b"/X")
        files[f"doubled {name!r}"] = good.replace(name, name + b" " + name)
    for number in (b"-1", b"0", b"1e9", b"99999999999999999999", b"null", b"[[[[", b"<<" * 500, b"(" * 500):
        files[f"count {number[:9]!r}"] = good.replace(b"/Count 1", b"/Count " + number)
        files[f"box {number[:9]!r}"] = good.replace(b"612.0000", number)
        files[f"length {number[:9]!r}"] = good.replace(b"/Length ", b"/Length " + number + b" ")
    return files


def test_hundreds_of_broken_files_fail_kindly() -> None:
    files = broken_files()
    assert len(files) >= 300

    def outcome(item: tuple[str, bytes]) -> str:
        name, data = item
        try:
            drawn = rendered(data, page_dpi=36, document_timeout=20)
        except (InvalidDocumentError, DocumentTooLargeError) as error:
            return f"{type(error).__name__}: {error}"
        assert drawn.ndim == 3, name
        return "shown"

    with ThreadPoolExecutor(4) as threads:
        counted = Counter(threads.map(outcome, files.items()))
    # PDFium mends what it can. What it cannot is refused, and nothing of it is left.
    assert counted["shown"] >= 50, counted
    assert sum(count for said, count in counted.items() if "broken" in said) >= 50, counted
    assert not rendering()
    assert rendered(GOOD, page_dpi=72).shape == (792, 612, 3)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (encrypted(), InvalidDocumentError, "encrypted; save it without a password"),
        (b"%PDF-1.7", InvalidDocumentError, "broken or truncated"),
        (pdf_file([]), InvalidDocumentError, "broken or truncated"),
        (claims(1000), InvalidDocumentError, "no pages, or more than its file can hold"),
        (cyclic(), InvalidDocumentError, "broken or truncated"),
        (slow(), DocumentTooLargeError, "longer than 1.5 s"),
        (exponential(), DocumentTooLargeError, "longer than 1.5 s|bytes of memory"),
        (recursive(), InvalidRequestError, "longer than 1.5 s|bytes of memory|crashed"),
    ],
    ids=["encrypted", "empty", "no pages", "claims pages", "cyclic", "slow", "exponential", "recursive"],
)
def test_hostile_files_are_refused_and_their_process_ends(data: bytes, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rendered(data, document_timeout=1.5)
    assert not rendering()


@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        (signal.SIGKILL, InvalidDocumentError, "was killed, perhaps for lack of memory"),
        (signal.SIGXCPU, DocumentTooLargeError, "takes longer than 30 s to render"),
        (signal.SIGABRT, DocumentTooLargeError, "aborted: the document is broken, or takes more than 536,870,912"),
        (signal.SIGSEGV, InvalidDocumentError, "crashed the process"),
    ],
)
def test_ended_process_says_what_ended_it(number: int, error: type[Exception], message: str) -> None:
    process = PDFProcess(GOOD, LIMITS)
    os.kill(process.process.pid, number)
    with pytest.raises(error, match=message):
        page_image(process, 0)
    assert not rendering()


def test_an_image_that_swells_stays_within_the_memory() -> None:
    data = bomb()
    assert len(data) < 5_000_000
    process = PDFProcess(data, MediaConfig(document_memory="128MiB"))
    worker = psutil.Process(process.process.pid)
    largest = 0

    def watch() -> None:
        nonlocal largest
        while True:
            try:
                largest = max(largest, worker.memory_info().vms)
            except psutil.Error:
                return
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    start = worker.memory_info().vms
    watcher.start()
    with contextlib.suppress(DocumentTooLargeError):  # or else the page comes without the image
        page_image(process, 0)
    process.close()
    watcher.join()
    if sys.platform == "linux":
        assert largest <= start + 128 * 1024**2
    assert not rendering()


def test_ten_thousand_pages_are_counted_and_shown() -> None:
    data = pdf_file([page("", (20, 10 + number % 7)) for number in range(10_000)])
    process = PDFProcess(data, LIMITS)
    assert process.num_pages == 10_000
    assert page_image(process, 9_999).size == (40, 2 * (10 + 9_999 % 7))
    process.close()
    assert not rendering()


def test_abandoned_page_is_not_rendered_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    event = threading.Event()
    process = PDFProcess(slow(), LIMITS)
    threading.Timer(0.2, event.set).start()
    token = cancellation.current.set(event)
    try:
        with pytest.raises(CancelledWorkError):
            page_image(process, 0)
    finally:
        cancellation.current.reset(token)
    assert not rendering()


def test_process_knows_no_secrets_and_is_confined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMSERVE_API_KEY", "secret")
    process = PDFProcess(GOOD, LIMITS)
    worker = psutil.Process(process.process.pid)
    assert "VLMSERVE_API_KEY" not in worker.environ()
    if sys.platform == "linux":
        assert worker.rlimit(psutil.RLIMIT_FSIZE) == (0, 0)
        assert 31 <= worker.rlimit(psutil.RLIMIT_CPU)[0] <= 33
        assert worker.rlimit(psutil.RLIMIT_AS)[1] > LIMITS.document_memory
    process.close()


def test_without_pdfium_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_server.end_servers()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [entry for entry in sys.path if "site-packages" not in entry])
        with pytest.raises(InvalidDocumentError, match="pip install pypdfium2"):
            PDFProcess(GOOD, LIMITS)
    assert not rendering()
    fork_server.end_servers()


def test_what_a_captured_process_answers_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [
        '{"pages": -5}\n',
        '{"pages": "many"}\n',
        "[" * 5000 + "\n",
        '{"pages": 1}\n{"width": 100000, "height": 100000}\n',
        '{"pages": 1}\n{"width": -1, "height": -1}\n',
        '{"pages": 1}\n{"width": 10, "height": 10}\nshort',
        "nonsense\n",
        "x" * 10_000,
    ]
    with captured(monkeypatch) as answer_with:
        for answer in answers:
            answer_with(answer)
            with pytest.raises((InvalidDocumentError, DocumentTooLargeError)):
                rendered(GOOD, document_timeout=1)
    assert not rendering()


def test_time_counts_less_at_lower_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(isolated, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    process = IsolatedProcess("pdf", 3, lambda reason, _: TimeoutError(reason))
    with contextlib.closing(process), pytest.raises(TimeoutError, match="slow"):
        process.receive(Answer)  # it waits for a file
    assert next(seconds) > 6
    assert not rendering()
