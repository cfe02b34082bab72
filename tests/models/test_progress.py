"""Progress of loading: bytes that add up to the checkpoint, as lines in a log and as a bar on a terminal."""

from __future__ import annotations

import io
import sys
from contextvars import copy_context
from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_llama
from tests.gguf_files import write_gguf
from vlmserve.models import progress
from vlmserve.models.identity import stored_bytes
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.progress import LoadingProgress, progress_text
from vlmserve.models.registry import load_model


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_loading_counts_all_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    folder = make_llama(tmp_path / "model", hidden_size=96, intermediate_size=96)
    if kind == "gguf":
        folder = write_gguf(folder, tmp_path / "model.gguf", types="Q8_0")
    counted = []
    monkeypatch.setattr(LoadingProgress, "advance", lambda self, num_bytes: counted.append(num_bytes))
    load_model(folder, LoadSettings(device=torch.device("cpu"), dtype=torch.bfloat16))
    assert sum(counted) == stored_bytes(folder)
    assert min(counted) >= 0


def test_log_gets_a_line_every_ten_seconds(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    caplog.set_level("INFO", "vlmserve")
    with LoadingProgress(4 * 10**9) as shown:
        for second in (4.0, 9.0, 10.0, 15.0, 20.5):
            now[0] = second
            shown.advance(5 * 10**8)
    assert caplog.messages == [
        "loading weights: 1.50 of 4.00 GB, 150 MB/s, 17 s left",
        "loading weights: 2.50 of 4.00 GB, 122 MB/s, 12 s left",
    ]


def test_listener_gets_lines_twice_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, heard = [0.0], []
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def load() -> None:
        progress.listener.set(heard.append)
        with LoadingProgress(4 * 10**8) as shown:
            for second in (0.4, 0.5, 0.9, 1.1):
                now[0] = second
                shown.advance(10**8)

    copy_context().run(load)
    assert heard == ["0.20 of 0.40 GB, 400 MB/s, 0 s left", "0.40 of 0.40 GB, 364 MB/s, 0 s left", ""]


def test_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with LoadingProgress(10**9) as shown:
        shown.advance(5 * 10**8)
    assert "loading weights" in terminal.getvalue()
    assert "GB" in terminal.getvalue()
    assert caplog.messages == []


def test_nothing_read_has_a_rate() -> None:
    assert progress_text(0, 10**9, 0.0).startswith("0.00 of 1.00 GB, 0 MB/s")
