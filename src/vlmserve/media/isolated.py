"""Decodes each file in a process of its own, with limited memory and time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import msgspec

from vlmserve.cancellation import check_cancelled
from vlmserve.errors import UnavailableError
from vlmserve.media.fork_server import FileKind, ForkServer, fork_for
from vlmserve.media.pixel_memory import make_memory, mapped

_POLL_INTERVAL = 0.05
"""Seconds between checks whether somebody waits for the file."""
_CHUNK = 1024**2
_REASONS = {
    -signal.SIGXCPU: "slow",
    -signal.SIGPROF: "slow",
    -signal.SIGKILL: "killed",
    -signal.SIGTERM: "killed",
    **dict.fromkeys((-signal.SIGABRT, -signal.SIGTRAP, -signal.SIGILL), "aborted"),
}
"""Reason by exit status of a process."""
_LONGEST_LINE = 4096

ErrorOf: TypeAlias = Callable[[str, str], Exception]
"""Makes an exception from a reason and a library's message.

All kinds of files have these reasons; decoders add others:

- "broken"
- "slow": time limit
- "memory": memory limit
- "crash": the library crashed
- "killed": something else ended the process
- "aborted": the library ended the process, for lack of memory or because the file broke its assumptions
"""

_PATIENCE = 1.0
"""Seconds of waiting after which a process gets a lower priority, so that short work overtakes it."""
_NICENESS = 10
_SLOWDOWN = 4.0
"""Seconds that count as one at lower priority, because generation takes the cores. The CPU time limit stays."""


class Answer(msgspec.Struct):
    """A line from the process. A compromised process may write anything."""

    error: str | None = None
    detail: str = ""
    in_memory: bool = False
    """True if the pixels are in shared memory, not in the pipe."""


AnswerType = TypeVar("AnswerType", bound=Answer)


class IsolatedProcess:
    """A process for one file. Raises UnavailableError if it does not start.

    Methods raise errors of `error_of`, and CancelledWorkError; close it then, and at the end. seconds: for all methods
    together. pixel_bytes: shared memory for `pixels`.
    """

    def __init__(
        self, kind: FileKind, seconds: float, error_of: ErrorOf, setup: str = "", pixel_bytes: int = 0
    ) -> None:
        self.error_of = error_of
        self._seconds_left = seconds
        self._waited = 0.0
        self._is_nice = False
        self._received = bytearray()
        self._memory = memoryview(b"")
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            try:
                stdin, self._input = _pipe(theirs, ours)
                self._output, stdout = _pipe(ours, theirs)
                memory = self._shared(pixel_bytes, theirs)
            except OSError as error:
                raise UnavailableError(f"no process could be started to decode the file: {error}") from error
            self._server, self.pid = fork_for(kind, stdin, stdout, setup, *memory)
            ours.pop_all()
        self._abandon = weakref.finalize(self, _abandon, self._server, self.pid, self._input, self._output)
        for pipe in (self._input, self._output):
            os.set_blocking(pipe, False)
            with contextlib.suppress(AttributeError, OSError):  # only on Linux, up to a limit for each user
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _CHUNK)

    def _shared(self, num_bytes: int, files: contextlib.ExitStack) -> list[int]:
        memory = make_memory(num_bytes) if num_bytes else None
        if memory is None:
            return []
        files.callback(os.close, memory)
        self._memory = mapped(os.dup(memory))
        return [memory]

    def open(self, data: bytes, settings: dict[str, Any], answer: type[AnswerType]) -> AnswerType:
        self._write(json.dumps({"num_bytes": len(data), **settings}).encode() + b"\n")
        self._write(data)
        return self.receive(answer)

    def ask(self, line: str, answer: type[AnswerType]) -> AnswerType:
        self.send(line)
        return self.receive(answer)

    def send(self, line: str) -> None:
        """The process works on the line until `receive` returns the answer."""
        self._write(f"{line}\n".encode())

    def pixels(self, size: int, answer: Answer) -> memoryview | bytearray:
        """The pixels after `answer`, valid until the next line is sent."""
        if not answer.in_memory:
            return self.read(size)
        if size > len(self._memory):
            raise self.error_of("broken", "")
        return self._memory[:size]

    def read(self, size: int) -> bytearray:
        pixels = bytearray(size)
        read = min(size, len(self._received))
        pixels[:read] = self._received[:read]
        del self._received[:read]
        with memoryview(pixels) as view:
            while read < size:
                self._wait(self._output, select.POLLIN)
                with view[read : read + _CHUNK] as rest:
                    count = os.readv(self._output, [rest])
                if not count:
                    raise self._ended()
                read += count
        return pixels

    def allow(self, seconds: float) -> None:
        self._seconds_left = seconds

    def close(self) -> None:
        self._memory = memoryview(b"")
        if self._abandon.detach():
            self._server.end(self.pid)
            os.close(self._input)
            os.close(self._output)
            self._input = self._output = -1

    def release(self) -> None:
        """Let a process that has answered end by itself; do not wait."""
        self._abandon()
        self._input = self._output = -1

    def receive(self, kind: type[AnswerType]) -> AnswerType:
        while b"\n" not in self._received:
            if len(self._received) > _LONGEST_LINE:
                raise self.error_of("broken", "")
            self._wait(self._output, select.POLLIN)
            received = os.read(self._output, _LONGEST_LINE)
            if not received:
                raise self._ended()
            self._received += received
        line, _, rest = self._received.partition(b"\n")
        self._received = rest
        try:
            answer = msgspec.json.decode(line, type=kind)
        except msgspec.DecodeError as error:
            raise self.error_of("broken", "") from error
        if answer.error is not None:
            raise self.error_of(answer.error, "".join(filter(str.isprintable, answer.detail)))
        return answer

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            self._wait(self._input, select.POLLOUT)
            try:
                view = view[os.write(self._input, view[:_CHUNK]) :]
            except BrokenPipeError:
                raise self._ended() from None

    def _wait(self, pipe: int, event: int) -> None:
        poll = select.poll()
        poll.register(pipe, event)
        began = time.monotonic()
        while not poll.poll(_POLL_INTERVAL * 1000):
            check_cancelled()
            began = self._count(began)
            if self._seconds_left < 0:
                raise self.error_of("slow", "")
            if self._waited > _PATIENCE:
                self._yield_to_others()
        self._count(began)
        check_cancelled()

    def _count(self, began: float) -> float:
        """Count the time since `began`; return the time until which it is counted."""
        now = time.monotonic()
        self._waited += now - began
        self._seconds_left -= (now - began) / (_SLOWDOWN if self._is_nice else 1)
        return now

    def _yield_to_others(self) -> None:
        if not self._is_nice:
            self._is_nice = True
            with contextlib.suppress(OSError):  # the process has ended
                os.setpriority(os.PRIO_PROCESS, self.pid, _NICENESS)

    def _ended(self) -> Exception:
        return self.error_of(_REASONS.get(self._server.end(self.pid), "crash"), "")


def _pipe(reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[int, int]:
    reading, writing = os.pipe()
    reader.callback(os.close, reading)
    writer.callback(os.close, writing)
    return reading, writing


def _abandon(server: ForkServer, pid: int, *pipes: int) -> None:
    """End a process that nobody closed. Garbage collection may call this at any time, so it does not wait."""
    server.abandon(pid)
    for pipe in pipes:
        os.close(pipe)
