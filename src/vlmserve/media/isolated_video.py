"""Video decoder of isolated processes, with FFmpeg's libraries (PyAV)."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from vlmserve.media.isolated_limits import Answer, RefusedError, address_space, limit, limit_cpu


class VideoDecoder:
    """A line is a frame number, from 0. A smaller number restarts from the beginning."""

    def __init__(self) -> None:
        try:
            import av
        except ImportError as error:
            raise RefusedError("missing") from error
        self._library: Any = av
        self._frame: Any = None
        self._number = -1

    def open(self, data: bytes, settings: dict[str, Any]) -> dict[str, Any]:
        """Counts frames without decoding them, because the header may be wrong."""
        limit("RLIMIT_AS", address_space() + settings["memory"])
        limit_cpu(settings["seconds"])
        self._max_pixels = settings["max_pixels"]
        options = {"protocol_whitelist": "", "format_whitelist": settings["format"]}
        self._container = self._library.open(io.BytesIO(data), format=settings["format"], options=options)
        if not self._container.streams.video:
            raise RefusedError("no video")
        self._stream = stream = self._container.streams.video[0]
        stream.codec_context.thread_count = 1
        self._check(stream.width, stream.height)
        count = self._count(settings["max_frames"])
        rate = float(stream.average_rate or stream.guessed_rate or 0)
        self._restart()
        return {"frames": count, "rate": rate, "width": stream.width, "height": stream.height}

    def answer(self, line: str) -> Answer:
        """RGB, not rotated. Numbers after the last frame return the last one: a packet may contain no frame."""
        wanted = int(line)
        if wanted < self._number:
            self._restart()
        while self._number < wanted:
            frame = next(self._frames, None)
            if frame is None:
                break
            self._frame = frame
            self._number += 1
        if self._frame is None:
            raise RefusedError("no frames")
        self._check(self._frame.width, self._frame.height)
        frame = self._frame.reformat(format="rgb24")
        plane = frame.planes[0]
        fields = {
            "width": frame.width,
            "height": frame.height,
            "stride": plane.line_size,
            "rotation": self._frame.rotation,
        }
        return fields, [memoryview(plane)[: plane.line_size * frame.height]]

    def _restart(self) -> None:
        self._container.seek(0)
        self._frames: Iterator[Any] = iter(self._container.decode(self._stream))
        self._frame, self._number = None, -1

    def _count(self, most: int) -> int:
        count = 0
        for packet in self._container.demux(self._stream):
            count += packet.size > 0
            if count > most:
                raise RefusedError("too many frames")
        return count

    def _check(self, width: int, height: int) -> None:
        if width * height > self._max_pixels:
            raise RefusedError("too large", f"{width:,} {height:,}")
