"""The process that renders one PDF: it reads the file, limits itself, and answers with pages until it is ended.

It runs as a script that imports nothing of vlmserve. Standard input: a line of JSON with the settings, the file, and
then a line for each page, with its number from 0. Standard output: a line of JSON after each of these, which a page's
pixels follow. PDFium can be interrupted in no other way than by ending its process, and a file that is made to break it
breaks nothing else here.
"""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Any, BinaryIO

_POINTS = 72
"""In an inch."""
_LONGEST_SIDE = 30_000
"""Pixels."""
_ENCRYPTED = (4, 5)
"""PDFium's errors of passwords and of other ways to encrypt."""


def _limit(memory: int, seconds: int) -> None:
    """Memory is bytes beyond what the process has already."""
    import resource

    limits = {
        "RLIMIT_AS": _address_space() + memory,
        "RLIMIT_CPU": seconds,
        "RLIMIT_CORE": 0,
        "RLIMIT_FSIZE": 0,
        "RLIMIT_NPROC": 0,
    }
    for name, value in limits.items():
        try:
            resource.setrlimit(getattr(resource, name), (value, value))
        except (AttributeError, ValueError, OSError):
            # Not every system has all of them; the parent ends a process that takes too long in any case.
            continue


def _address_space() -> int:
    """Bytes that the process has mapped, where the system says so."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def page_scale(width: float, height: float, dpi: float, max_pixels: int) -> float:
    """Pixels for each point of a page of that size in points, as many as `dpi` says where they are not too many."""
    scale = min(dpi / _POINTS, math.sqrt(max_pixels / (width * height)), _LONGEST_SIDE / max(width, height))
    while math.ceil(width * scale) * math.ceil(height * scale) > max_pixels and scale * max(width, height) > 1:
        scale *= 0.995
    return scale


def _answer(out: BinaryIO, pixels: bytes | memoryview = b"", **fields: Any) -> None:
    out.write(json.dumps(fields).encode() + b"\n")
    out.write(pixels)
    out.flush()


def _open(data: bytes, out: BinaryIO) -> Any:
    """The document, or None if it cannot be opened, which has been answered then."""
    import pypdfium2

    try:
        pdf = pypdfium2.PdfDocument(data)
        pdf.init_forms()
    except pypdfium2.PdfiumError as error:
        _answer(out, error="encrypted" if getattr(error, "err_code", None) in _ENCRYPTED else "broken")
        return None
    _answer(out, pages=len(pdf))
    return pdf


def _render(pdf: Any, number: int, settings: dict[str, Any], out: BinaryIO) -> None:
    import pypdfium2

    try:
        page = pdf[number]
        width, height = page.get_size()
        if not (0 < width < math.inf and 0 < height < math.inf):
            _answer(out, error="size")
            return
        scale = page_scale(width, height, settings["dpi"], settings["max_pixels"])
        bitmap = page.render(scale=scale, rev_byteorder=True)
        row = bitmap.width * 3
        pixels = memoryview(bitmap.buffer).cast("B")
        if bitmap.stride != row:
            starts = range(0, bitmap.stride * bitmap.height, bitmap.stride)
            pixels = memoryview(b"".join(pixels[start : start + row] for start in starts))
        _answer(out, pixels, width=bitmap.width, height=bitmap.height)
        bitmap.close()
        page.close()
    except pypdfium2.PdfiumError:
        _answer(out, error="broken")


def main() -> None:
    """Serve until standard input ends."""
    # What libraries print must not come between the answers.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    settings = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = settings["sys_path"]
    try:
        import pypdfium2  # noqa: F401
    except ImportError:
        _answer(out, error="missing")
        return
    _answer(out)
    data = sys.stdin.buffer.read(settings["num_bytes"])
    _limit(settings["memory"], settings["seconds"])
    try:
        pdf = _open(data, out)
        for line in sys.stdin.buffer if pdf is not None else ():
            _render(pdf, int(line), settings, out)
    except MemoryError:
        _answer(out, error="memory")


if __name__ == "__main__":
    main()
