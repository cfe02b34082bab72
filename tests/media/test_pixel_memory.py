"""Pixels in memory that is shared with the process that decodes them."""

from __future__ import annotations

import errno
import gc
import io
import mmap
import os
import sys
from typing import Any

import numpy as np
import pytest

from tests.media.images_for_tests import noise
from tests.rendering import rendering
from vlmserve.errors import InvalidVideoError, UnavailableError
from vlmserve.media import isolated, pixel_memory
from vlmserve.media.decoding import DecodingMemory
from vlmserve.media.isolated import IsolatedProcess
from vlmserve.media.video_files import VideoFile
from vlmserve.settings.config import MediaConfig

needs_memory_files = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="this system or Python has no files in memory"
)


@pytest.fixture(scope="module")
def film() -> bytes:
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for seed in range(5):
            container.mux(stream.encode(av.VideoFrame.from_image(noise(64, 48, seed=seed))))
        container.mux(stream.encode())
    return file.getvalue()


def frames(data: bytes) -> list[np.ndarray]:
    video, memory = VideoFile(data, MediaConfig()), DecodingMemory(2**28)
    shown = []
    for number in range(video.num_frames):
        ahead = number + 1 if number + 1 < video.num_frames else None
        with video.frame(number, memory, ahead) as image:
            shown.append(np.asarray(image))
    video.close()
    return shown


def decoded(data: bytes) -> list[np.ndarray]:
    import av

    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


@pytest.mark.parametrize("memory", [pytest.param("shared", marks=needs_memory_files), "small", "missing"])
def test_frames_are_those_of_the_library(film: bytes, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    through_pipe: list[int] = []
    read = IsolatedProcess.read

    def count(process: IsolatedProcess, size: int) -> bytearray:
        through_pipe.append(size)
        return read(process, size)

    monkeypatch.setattr(IsolatedProcess, "read", count)
    if memory != "shared":
        make = (lambda _: None) if memory == "missing" else (lambda _: pixel_memory.make_memory(1000))
        monkeypatch.setattr(isolated, "make_memory", make)
    np.testing.assert_array_equal(frames(film), decoded(film))
    assert (through_pipe == []) == (memory == "shared")


@needs_memory_files
def test_memory_cannot_shrink() -> None:
    """A read after its end would end this process."""
    file = pixel_memory.make_memory(2 * mmap.PAGESIZE)
    assert file is not None
    memory = pixel_memory.mapped(os.dup(file))
    for size in (0, mmap.PAGESIZE, 3 * mmap.PAGESIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(file, size)
    os.close(file)
    assert bytes(memory[-4:]) == bytes(4)


@pytest.mark.parametrize("missing", ["os.memfd_create", "fcntl.F_ADD_SEALS"])
def test_python_without_file_in_memory_has_none(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(missing, raising=False)
    assert pixel_memory.make_memory(1000) is None


@needs_memory_files
def test_pixels_beyond_the_memory_are_rejected(film: bytes) -> None:
    video = VideoFile(film, MediaConfig())
    answer = isolated.Answer(in_memory=True)
    with pytest.raises(InvalidVideoError, match="broken"):
        video.process.pixels(10**9, answer)
    video.close()


@needs_memory_files
@pytest.mark.parametrize("call", [("os.pipe", 1), ("os.pipe", 2), ("os.dup", 1), ("mmap.mmap", 1)], ids=str)
def test_process_that_cannot_start_leaves_no_file(
    film: bytes, call: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    VideoFile(film, MediaConfig()).close()  # starts what later videos share
    (name, last), calls = call, 0
    module, _, function = name.partition(".")
    work = getattr(sys.modules[module], function)

    def fail(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == last:
            raise OSError(errno.EMFILE, "Too many open files")
        return work(*arguments)

    gc.collect()
    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(name, fail)
    with pytest.raises(UnavailableError, match="Too many open files"):
        VideoFile(film, MediaConfig())
    monkeypatch.undo()
    assert len(os.listdir("/proc/self/fd")) <= len(before)
    assert not rendering()
