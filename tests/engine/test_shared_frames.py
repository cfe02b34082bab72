"""Messages between processes of one machine: whole ones, whatever their size, and nothing left behind."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import numpy as np
import pytest

from vlmserve.engine.shared_frames import receive_frames, send_frames

SIZES = [[], [0], [1], [7, 64, 100_000], [3_000_000, 1]]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("first", [0, 5, 2_000_000])
@pytest.mark.parametrize("sizes", SIZES)
def test_all_get_what_was_sent(first: int, sizes: list[int]) -> None:
    random = np.random.default_rng(first)
    frames: list[bytes | memoryview] = [random.bytes(size) for size in (first, *sizes)]
    pairs = [socket.socketpair() for _ in range(3)]
    sender = threading.Thread(target=send_frames, args=([ours for ours, _ in pairs], frames))
    sender.start()
    for _, theirs in pairs:
        assert [bytes(frame) for frame in receive_frames(theirs)] == frames
    sender.join()
    for ours, theirs in pairs:
        ours.close()
        assert receive_frames(theirs) == []
        theirs.close()


def test_messages_stay_apart_and_arrays_outlive_their_sender() -> None:
    ours, theirs = socket.socketpair()
    arrays = [np.full(1000, number, np.float32) for number in range(5)]
    for array in arrays:
        send_frames([ours], [b"one", array.data])
        send_frames([ours], [b"none"])
    ours.close()
    received = []
    for _ in arrays:
        received.append(receive_frames(theirs))
        assert receive_frames(theirs) == [b"none"]
    for array, (_, memory) in zip(arrays, received, strict=True):
        read = np.frombuffer(memory, np.float32)
        assert not read.flags.writeable
        np.testing.assert_array_equal(read, array)
    theirs.close()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_no_file_stays_open() -> None:
    ours, theirs = socket.socketpair()
    before = open_files()
    for _ in range(20):
        send_frames([ours], [b"image", bytes(100)])
        assert receive_frames(theirs)[1:] == [bytes(100)]
    assert open_files() == before
    theirs.close()
    with pytest.raises(OSError, match="pipe"):
        send_frames([ours], [b"image", bytes(100)])
    ours.close()


def test_a_truncated_message_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    copy, inspected = socket.socketpair()
    send_frames([copy], [b"a message"])
    ours.sendall(inspected.recv(15))
    ours.close()
    with pytest.raises(ConnectionError):
        receive_frames(theirs)
    for one in (theirs, copy, inspected):
        one.close()
