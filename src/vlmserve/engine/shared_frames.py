"""Sends frames to processes on the same machine: a small message over sockets, arrays in shared memory.

Arrays are copied once for all receivers. The memory is anonymous, so crashes leave nothing behind.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import tempfile
from array import array
from collections.abc import Sequence

from vlmserve.frames import Frames

_HEAD = struct.Struct("<QI")
"""Bytes of the first frame, and the number of arrays. The bytes of each array follow."""
_ALIGNMENT = 64


def send_frames(channels: Sequence[socket.socket], frames: Frames) -> None:
    """Send a message to Unix domain stream sockets. Raises OSError if one is closed."""
    first, *arrays = (memoryview(frame).cast("B") for frame in frames)
    sizes = [len(one) for one in arrays]
    message = b"".join((_HEAD.pack(len(first), len(arrays)), array("Q", sizes).tobytes(), first))
    memory = _filled(arrays) if any(sizes) else None
    try:
        files = [] if memory is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [memory]))]
        for channel in channels:
            sent = channel.sendmsg([message], files)
            channel.sendall(message[sent:])
    finally:
        if memory is not None:
            os.close(memory)


def receive_frames(channel: socket.socket) -> list[bytes | memoryview]:
    """Return the next message's frames, with read-only arrays in shared memory. Empty if the sender has closed."""
    head, files, _, _ = socket.recv_fds(channel, _HEAD.size, 1)
    if not head:
        return []
    length, count = _HEAD.unpack(head + _received(channel, _HEAD.size - len(head)))
    sizes = array("Q")
    sizes.frombytes(_received(channel, count * sizes.itemsize))
    first = _received(channel, length)
    memory = memoryview(b"")
    for number in files:
        with open(number, "rb") as file:
            memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    arrays = (memory[start : start + size] for start, size in zip(_offsets(sizes), sizes, strict=False))
    return [first, *arrays]


def _offsets(sizes: Sequence[int]) -> list[int]:
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    return offsets


def _filled(arrays: Sequence[memoryview]) -> int:
    offsets = _offsets([len(one) for one in arrays])
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("vlmserve")
    else:
        with tempfile.TemporaryFile() as named:
            file = os.dup(named.fileno())
    os.ftruncate(file, offsets[-1])
    for start, one in zip(offsets, arrays, strict=False):
        while one:
            written = os.pwrite(file, one, start)
            start, one = start + written, one[written:]
    return file


def _received(channel: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = channel.recv(min(count, 1 << 20))
        if not part:
            raise ConnectionError("the message was cut off")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
