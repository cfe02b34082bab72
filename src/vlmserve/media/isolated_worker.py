"""Script that forks a process for each file, and ends it on request (`fork_server.py`).

It imports one library, and forks when it receives two pipes from the socket on standard input. The first pipe brings a
JSON line with settings, the file, and a line for each page or image. The second takes a JSON line for each, followed by
pixels, if any.

Files cannot affect each other, and a library that cannot be interrupted ends with its process.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from vlmserve.media.isolated_limits import Decoder, RefusedError

_DECODERS = {
    "pdf": ("vlmserve.media.isolated_pdf", "PDFDecoder"),
    "image": ("vlmserve.media.isolated_images", "ImageDecoder"),
    "video": ("vlmserve.media.isolated_video", "VideoDecoder"),
    "grammar": ("vlmserve.sampling.isolated_grammar", "GrammarDecoder"),
}
"""Module and class of each kind. They are imported after the parent has sent its `sys.path`."""
_LONGEST_LINE = 300


def _write(
    out: BinaryIO,
    fields: dict[str, Any],
    pixels: Iterable[bytes | memoryview] = (),
    memory: memoryview | None = None,
) -> None:
    """A single piece of pixels goes into `memory` if it fits."""
    if memory is not None:
        pixels = list(pixels)
        if len(pixels) == 1 and len(pixels[0]) <= len(memory):
            memory[: len(pixels[0])] = memoryview(pixels[0]).cast("B")
            fields, pixels = {**fields, "in_memory": True}, ()
    out.write(json.dumps(fields).encode() + b"\n")
    for piece in pixels:
        out.write(piece)
    out.flush()


def _decode(decoder: Decoder | RefusedError, stdin: BinaryIO, out: BinaryIO, *files: int) -> None:
    """Answer until standard input ends or the decoder refuses. files: shared memory for pixels."""
    from vlmserve.media.isolated_limits import LONGEST_DETAIL, RefusedError, limit
    from vlmserve.media.pixel_memory import mapped

    try:
        memory = mapped(files[0]) if files else None
        settings = json.loads(stdin.readline())
        data = stdin.read(settings["num_bytes"])
        if isinstance(decoder, RefusedError):
            raise decoder
        limit("RLIMIT_CORE", 0)
        limit("RLIMIT_FSIZE", 0)
        _write(out, decoder.open(data, settings))
        for line in stdin:
            _write(out, *decoder.answer(line.decode().strip()), memory)
    except RefusedError as refusal:
        _write(out, {"error": refusal.reason, "detail": refusal.detail})
    except MemoryError:
        _write(out, {"error": "memory"})
    except Exception as error:  # libraries raise anything on broken data and lack of memory
        reason = "memory" if "memory" in str(error).lower() else "broken"
        _write(out, {"error": reason, "detail": str(error)[:LONGEST_DETAIL]})


def _fork(decoder: Decoder | RefusedError, pipes: list[int]) -> int:
    """Return the process id. pipes: two, and optionally memory for pixels. The process inherits only these."""
    pid = os.fork()
    if pid == 0:
        try:
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            os.close(nothing)
            _decode(decoder, os.fdopen(pipes[0], "rb"), os.fdopen(pipes[1], "wb"), *pipes[2:])
        finally:
            os._exit(0)  # closes the pipes; the parent kills a process that closes them earlier
    for pipe in pipes:
        os.close(pipe)
    return pid


def _load(kind: str, setup: str) -> Decoder | RefusedError:
    """setup: argument of a decoder that takes one."""
    import vlmserve.media.pixel_memory  # noqa: F401 (imported before processes are forked)
    from vlmserve.media.isolated_limits import RefusedError

    module, name = _DECODERS[kind]
    try:
        decoder: Decoder = getattr(import_module(module), name)(*([setup] if setup else []))
    except RefusedError as refusal:
        return refusal
    return decoder


def main() -> None:
    """Fork and end processes until the socket closes."""
    with socket.socket(fileno=0) as connection:
        first = connection.makefile("rb", buffering=0).readline()
        if not first:
            return
        settings = json.loads(first)
        sys.path[:] = settings["path"]
        decoder = _load(settings["kind"], settings["setup"])
        gc.freeze()  # otherwise garbage collection copies shared pages
        running = set()
        while True:
            line, pipes, _, _ = socket.recv_fds(connection, _LONGEST_LINE, 3)
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
    """Kill a process unless it has ended; return its exit status. Until then its id is not reused."""
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    main()
