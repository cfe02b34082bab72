"""Processes that decode one file each, limit themselves, and answer until they are ended.

This runs as a script that imports nothing of vlmserve. It loads a library, and forks a process whenever two pipes come
through the connection that is its standard input; `fork_server.py` is at the other end. Through the first pipe come a
line of JSON with the settings, the file, and then a line for each page or image. Through the second go a line of JSON
after the file and after each of these lines, and pixels after those that say what size they have. PDFium and libheif
can be interrupted in no other way than by ending their process, and a file that is made to break them breaks nothing
else here.
"""

from __future__ import annotations

import gc
import io
import json
import math
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, Protocol, TypeAlias

_POINTS = 72
"""In an inch."""
_LONGEST_SIDE = 30_000
"""Pixels."""
_ENCRYPTED = (4, 5)
"""PDFium's errors of passwords and of other ways to encrypt."""
_THREADS = 4
"""That decode one image."""
_ORIENTATION = 0x0112
"""EXIF tag of how the camera was held."""
_BAND = 2**17
"""Pixels that are packed at once: few enough to stay in a core's cache."""
_LONGEST_DETAIL = 300
"""Characters of what a library says of a file."""

Answer: TypeAlias = tuple[dict[str, Any], Iterable[bytes | memoryview]]
"""Fields of the line, and the pixels after it."""


class _RefusedError(Exception):
    """Why the file is not decoded, as the parent knows the reasons, and what a library says of it."""

    def __init__(self, reason: str, detail: object = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = str(detail)[:_LONGEST_DETAIL]


class _Decoder(Protocol):
    """Loads its library when it is made."""

    def open(self, data: bytes, settings: dict[str, Any]) -> dict[str, Any]:
        """What the file says of itself."""
        ...

    def answer(self, line: str) -> Answer:
        """What the parent asks for."""
        ...


class _PDF:
    """Each line is the number of a page, from 0."""

    def __init__(self) -> None:
        try:
            import pypdfium2
        except ImportError as error:
            raise _RefusedError("missing") from error
        self._library: Any = pypdfium2

    def open(self, data: bytes, settings: dict[str, Any]) -> dict[str, Any]:
        """The number of pages."""
        _limit("RLIMIT_NPROC", 0)
        _limit("RLIMIT_AS", _address_space() + settings["memory"])
        _limit("RLIMIT_CPU", settings["seconds"])
        self._settings = settings
        try:
            self._pdf = self._library.PdfDocument(data)
            self._pdf.init_forms()
        except self._library.PdfiumError as error:
            encrypted = getattr(error, "err_code", None) in _ENCRYPTED
            raise _RefusedError("encrypted" if encrypted else "broken") from error
        return {"pages": len(self._pdf)}

    def answer(self, line: str) -> Answer:
        """A page in RGB."""
        try:
            page = self._pdf[int(line)]
            width, height = page.get_size()
            if not (0 < width < math.inf and 0 < height < math.inf):
                raise _RefusedError("size")
            scale = page_scale(width, height, self._settings["dpi"], self._settings["max_pixels"])
            bitmap = page.render(scale=scale, rev_byteorder=True)
        except self._library.PdfiumError as error:
            raise _RefusedError("broken") from error
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
    """Pixels for each point of a page of that size in points, as many as `dpi` says where they are not too many."""
    scale = min(dpi / _POINTS, math.sqrt(max_pixels / (width * height)), _LONGEST_SIDE / max(width, height))
    while math.ceil(width * scale) * math.ceil(height * scale) > max_pixels and scale * max(width, height) > 1:
        scale *= 0.995
    return scale


class _Opened(Protocol):
    """An opened file of images. count: of them. number: which is shown, from 0. size, mode: of that one."""

    count: int
    number: int
    size: tuple[int, int]
    mode: str

    def __init__(self, data: bytes) -> None: ...

    def go_to(self, number: int) -> None:
        """Show another image."""
        ...

    def orientation(self) -> object:
        """How EXIF says that the image stands."""
        ...

    def decode(self) -> tuple[int, Iterable[bytes | memoryview]]:
        """Bytes from one row to the next, and all rows."""
        ...


class _HEIC:
    """Read by libheif."""

    def __init__(self, data: bytes) -> None:
        import pillow_heif
        from PIL import Image

        self._holder = Image.Image()
        try:
            self._file = pillow_heif.open_heif(data, convert_hdr_to_8bit=True, hdr_to_16bit=True, remove_stride=False)
        except (OSError, ValueError, RuntimeError, EOFError) as error:
            raise SyntaxError(str(error)) from error
        self.count = len(self._file)
        self.go_to(self._file.primary_index)

    def go_to(self, number: int) -> None:
        self.number = number
        self._image = self._file[number]
        self.size, self.mode = self._image.size, self._image.mode

    def orientation(self) -> object:
        import pillow_heif

        pillow_heif.set_orientation(self._image.info)  # libheif has turned the image, which EXIF is not to do again
        self._holder.info, self._holder._exif = self._image.info, None
        return self._holder.getexif().get(_ORIENTATION)

    def decode(self) -> tuple[int, Iterable[bytes | memoryview]]:
        pixels = memoryview(self._image.data)
        self.size, stride = self._image.size, self._image.stride
        num_bytes = stride * self.size[1]
        if len(pixels) < num_bytes:
            raise ValueError("not enough image data")
        return stride, [pixels[:num_bytes]]


class _AVIF:
    """Read by Pillow."""

    def __init__(self, data: bytes) -> None:
        from PIL import AvifImagePlugin

        self._image = AvifImagePlugin.AvifImageFile(io.BytesIO(data))
        self.count, self.number = self._image.n_frames, self._image.tell()
        self.size, self.mode = self._image.size, self._image.mode

    def go_to(self, number: int) -> None:
        self._image.seek(number)
        self.number, self.size, self.mode = number, self._image.size, self._image.mode

    def orientation(self) -> object:
        return self._image.getexif().get(_ORIENTATION)

    def decode(self) -> tuple[int, Iterable[bytes | memoryview]]:
        self._image.load()
        self.size = width, height = self._image.size
        rows = max(1, _BAND // width)
        bands = (self._image.crop((0, top, width, min(top + rows, height))) for top in range(0, height, rows))
        return width * len(self._image.getbands()), (band.tobytes() for band in bands)


class _Image:
    """A line is a number, which goes to that image of the file, or empty, which decodes it."""

    def __init__(self) -> None:
        from PIL import AvifImagePlugin, Image

        # What Pillow imports when it is first asked for.
        Image.new("RGB", (1, 1)).tobytes()
        Image.Exif().load(b"Exif\0\0II*\0\x08\0\0\0\0\0")
        AvifImagePlugin.DEFAULT_MAX_THREADS = _THREADS
        self._formats: dict[str, type[_Opened]] = {"AVIF": _AVIF}
        try:
            import pillow_heif
        except ImportError:
            return  # which is an error when the first HEIC comes
        pillow_heif.options.THUMBNAILS = False
        pillow_heif.options.DECODE_THREADS = _THREADS
        self._formats["HEIF"] = _HEIC

    def open(self, data: bytes, settings: dict[str, Any]) -> dict[str, Any]:
        """The number of images, and the fields of the first that is shown."""
        self._settings = settings
        if settings["format"] not in self._formats:
            raise _RefusedError("missing")
        self._allow(0)
        try:
            self._file = self._formats[settings["format"]](data)
        except (SyntaxError, IndexError, TypeError, struct.error) as error:  # those that say it is another format
            raise _RefusedError("unidentified") from error
        return {"images": self._file.count, "shown": self._file.number, **self._fields()}

    def answer(self, line: str) -> Answer:
        """The fields of an image, and its pixels if it is decoded."""
        if line:
            self._file.go_to(int(line))
            return self._fields(), ()
        self._allow(math.prod(self._file.size) * self._settings["pixel_memory"])
        stride, pixels = self._file.decode()
        return {**self._fields(), "stride": stride}, pixels

    def _allow(self, memory: int) -> None:
        """Bytes beyond what is always allowed, and the time for one image."""
        _limit("RLIMIT_AS", _address_space() + self._settings["memory"] + memory, for_good=False)
        _limit("RLIMIT_CPU", math.ceil(sum(os.times()[:2])) + self._settings["seconds"] * _THREADS, for_good=False)

    def _fields(self) -> dict[str, Any]:
        try:
            orientation = self._file.orientation()
        except Exception:  # broken EXIF data says nothing about how the image stands
            orientation = None
        width, height = self._file.size
        return {
            "width": width,
            "height": height,
            "mode": self._file.mode,
            "orientation": orientation if isinstance(orientation, int) else 1,
        }


_DECODERS: dict[str, type[_Decoder]] = {"pdf": _PDF, "image": _Image}


def _limit(name: str, value: int, for_good: bool = True) -> None:
    import resource

    try:
        limit = getattr(resource, name)
        resource.setrlimit(limit, (value, value if for_good else resource.getrlimit(limit)[1]))
    except (AttributeError, ValueError, OSError):
        # Not every system has all of them; the parent ends a process that takes too long in any case.
        return


def _address_space() -> int:
    """Bytes that the process has mapped, where the system says so."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _write(out: BinaryIO, fields: dict[str, Any], pixels: Iterable[bytes | memoryview] = ()) -> None:
    out.write(json.dumps(fields).encode() + b"\n")
    for piece in pixels:
        out.write(piece)
    out.flush()


def _decode(decoder: _Decoder | _RefusedError, stdin: BinaryIO, out: BinaryIO) -> None:
    """Answer until standard input ends, or something is refused."""
    try:
        settings = json.loads(stdin.readline())
        data = stdin.read(settings["num_bytes"])
        if isinstance(decoder, _RefusedError):
            raise decoder
        _limit("RLIMIT_CORE", 0)
        _limit("RLIMIT_FSIZE", 0)
        _write(out, decoder.open(data, settings))
        for line in stdin:
            _write(out, *decoder.answer(line.decode().strip()))
    except _RefusedError as refusal:
        _write(out, {"error": refusal.reason, "detail": refusal.detail})
    except MemoryError:
        _write(out, {"error": "memory"})
    except Exception as error:  # libraries raise anything on broken data
        _write(out, {"error": "broken", "detail": str(error)[:_LONGEST_DETAIL]})


def _fork(decoder: _Decoder | _RefusedError, pipes: list[int]) -> int:
    """The id of a process that decodes a file. It has the two pipes, and nothing of this process's connection."""
    pid = os.fork()
    if pid == 0:
        try:
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            os.close(nothing)
            with os.fdopen(pipes[0], "rb") as stdin, os.fdopen(pipes[1], "wb") as out:
                _decode(decoder, stdin, out)
        finally:
            os._exit(0)
    for pipe in pipes:
        os.close(pipe)
    return pid


def main() -> None:
    """Fork processes and end them, as the lines say that come through the connection, until that ends."""
    with socket.socket(fileno=0) as connection:
        first = connection.makefile("rb", buffering=0).readline()
        if not first:
            return
        settings = json.loads(first)
        sys.path[:] = settings["path"]
        decoder: _Decoder | _RefusedError
        try:
            decoder = _DECODERS[settings["kind"]]()
        except _RefusedError as refusal:
            decoder = refusal
        gc.freeze()  # or else collecting garbage copies what processes share
        running = set()
        while True:
            line, pipes, _, _ = socket.recv_fds(connection, _LONGEST_DETAIL, 2)
            if not line:
                break
            if pipes:
                answer = _fork(decoder, pipes)
                running.add(answer)
            else:
                pid = int(line)
                answer = _end(pid) if pid in running else 0
                running.discard(pid)
            connection.sendall(b"%d\n" % answer)
    for pid in running:
        _end(pid)


def _end(pid: int) -> int:
    """How a process ended that no other takes the place of before."""
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    main()
