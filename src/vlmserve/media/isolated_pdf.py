"""PDF renderer of isolated processes, with PDFium."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from vlmserve.media.isolated_limits import Answer, RefusedError, address_space, limit, limit_cpu

_POINTS = 72
"""Points per inch."""
_LONGEST_SIDE = 30_000
"""Maximum pixels of a side."""
_ENCRYPTED = (4, 5)
"""PDFium's errors for passwords and other encryption."""


class PDFDecoder:
    """A line is a page number, from 0."""

    def __init__(self) -> None:
        try:
            import pypdfium2
        except ImportError as error:
            raise RefusedError("missing") from error
        self._library: Any = pypdfium2

    def open(self, data: bytes, settings: dict[str, Any]) -> dict[str, Any]:
        limit("RLIMIT_NPROC", 0)
        limit("RLIMIT_AS", address_space() + settings["memory"])
        limit_cpu(settings["seconds"])
        self._settings = settings
        try:
            self._pdf = self._library.PdfDocument(data)
            self._pdf.init_forms()
        except self._library.PdfiumError as error:
            encrypted = getattr(error, "err_code", None) in _ENCRYPTED
            raise RefusedError("encrypted" if encrypted else "broken") from error
        return {"pages": len(self._pdf)}

    def answer(self, line: str) -> Answer:
        try:
            page = self._pdf[int(line)]
            width, height = page.get_size()
            if not (0 < width < math.inf and 0 < height < math.inf):
                raise RefusedError("size")
            scale = page_scale(width, height, self._settings["dpi"], self._settings["max_pixels"])
            bitmap = page.render(scale=scale, rev_byteorder=True)
        except self._library.PdfiumError as error:
            raise RefusedError("broken") from error
        return {"width": bitmap.width, "height": bitmap.height}, self._pixels(page, bitmap)

    @staticmethod
    def _pixels(page: Any, bitmap: Any) -> Iterator[memoryview]:
        row = bitmap.width * 3
        pixels = memoryview(bitmap.buffer).cast("B")
        if bitmap.stride == row:
            yield pixels
        else:
            for start in range(0, bitmap.stride * bitmap.height, bitmap.stride):
                yield pixels[start : start + row]
        pixels.release()
        bitmap.close()
        page.close()


def page_scale(width: float, height: float, dpi: float, max_pixels: int) -> float:
    """Pixels per point for a page in points, at `dpi` or less to keep within `max_pixels`."""
    scale = min(dpi / _POINTS, math.sqrt(max_pixels / (width * height)), _LONGEST_SIDE / max(width, height))
    while math.ceil(width * scale) * math.ceil(height * scale) > max_pixels and scale * max(width, height) > 1:
        scale *= 0.995
    return scale
