"""Files are read ahead of the loader."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vlmserve.models import read_ahead
from vlmserve.models.read_ahead import ReadAhead


def test_tensors_are_requested_once_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    save_file({name: torch.zeros(100) for name in "abcd"}, path)
    requested: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, start, size, advice: requested.append(start), raising=False)
    monkeypatch.setattr(os, "POSIX_FADV_WILLNEED", 3, raising=False)
    monkeypatch.setattr(read_ahead, "WINDOW_BYTES", 600)
    ahead = ReadAhead([[(path, "a")], [(path, "a"), (path, "c")], [(path, "b")], [(path, "d"), (path, "unknown")]])
    counts = []
    for step in range(4):
        ahead.reach(step)
        counts.append(len(requested))
    first = min(requested)
    assert [start - first for start in requested] == [0, 800, 400, 1200]
    assert counts == [2, 3, 4, 4]


def test_large_tensors_are_requested_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    requested: list[tuple[int, int]] = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda file, start, size, advice: requested.append((start, size)), raising=False
    )
    monkeypatch.setattr(os, "POSIX_FADV_WILLNEED", 3, raising=False)
    monkeypatch.setattr(read_ahead, "REQUEST_BYTES", 150)
    ReadAhead([[(path, "a")]]).reach(0)
    first = requested[0][0]
    assert [(start - first, size) for start, size in requested] == [(0, 150), (150, 150), (300, 100)]
