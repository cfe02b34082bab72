"""Files are read ahead of the loader."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.waiting import wait_until
from vlmserve.models import read_ahead
from vlmserve.models.identity import TensorDigests
from vlmserve.models.read_ahead import ReadAhead


class Digests(TensorDigests):
    """Notes the tensors that it hashes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def prepare(self, path: Path, name: str) -> None:
        self.names.append(name)
        super().prepare(path, name)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({name: torch.zeros(100) for name in "abcd"}, path)
    return path


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Start and size of requested parts of files."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda file, start, size, advice: found.append((start, size)), raising=False
    )
    monkeypatch.setattr(os, "POSIX_FADV_WILLNEED", 3, raising=False)
    return found


def test_tensors_are_requested_once_in_order(
    path: Path, requests: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "WINDOW_BYTES", 600)
    digests = Digests()
    steps = [[(path, "a")], [(path, "a"), (path, "c")], [(path, "b")], [(path, "d"), (path, "unknown")]]
    counts = []
    with ReadAhead(steps, digests) as ahead:
        for step, last in enumerate(["c", "b", "d", "d"]):
            ahead.reach(step)
            wait_until(lambda last=last: digests.names[-1:] == [last])
            counts.append(len(requests))
    first = requests[0][0]
    assert [start - first for start, _ in requests] == [0, 800, 400, 1200]
    assert counts == [2, 3, 4, 4]
    assert digests.names == ["a", "c", "b", "d"]


def test_large_tensors_are_requested_in_pieces(
    path: Path, requests: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "REQUEST_BYTES", 150)
    digests = Digests()
    with ReadAhead([[(path, "a")]], digests):
        wait_until(lambda: digests.names)
    first = requests[0][0]
    assert [(start - first, size) for start, size in requests] == [(0, 150), (150, 150), (300, 100)]


def test_loader_finds_tensors_hashed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, digests = TensorDigests().of_file(path), Digests()
    progress: list[int] = []
    digests.on_read = progress.append
    with ReadAhead([[(path, name)] for name in "abcd"], digests):
        wait_until(lambda: len(digests.names) == 4)
    path.write_bytes(b"")  # nothing is read again
    for name in "abcd":
        digests.read(path, name)
    assert progress == [400] * 4
    assert digests.of_file(path) == expected


def test_errors_of_the_thread_reach_the_loader(path: Path) -> None:
    digests = Digests()
    ahead = ReadAhead([[(path, "a")]], digests)
    path.unlink()
    with pytest.raises(FileNotFoundError), ahead:
        wait_until(lambda: digests.names)


def test_errors_of_the_thread_end_the_load(path: Path) -> None:
    ahead = ReadAhead([[(path, "a")], [(path, "b")]], Digests())
    path.unlink()

    def fails() -> bool:
        try:
            ahead.reach(1)
        except FileNotFoundError:
            return True
        return False

    with pytest.raises(FileNotFoundError), ahead:
        wait_until(fails)


def test_interrupted_loads_stay_interrupted(path: Path) -> None:
    digests = Digests()
    ahead = ReadAhead([[(path, "a")]], digests)
    path.unlink()

    def interrupt() -> None:
        wait_until(lambda: digests.names)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), ahead:
        interrupt()


def test_leaving_early_ends_the_thread(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "WINDOW_BYTES", 1)
    digests = Digests()
    with ReadAhead([[(path, name)] for name in "abcd"], digests):
        wait_until(lambda: digests.names)
    assert digests.names == ["a"]
