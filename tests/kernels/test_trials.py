"""Trials of kernels against torch, and the file in which their results are remembered."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.native import built
from vlmserve.kernels import trials
from vlmserve.kernels.extension import extension

pytestmark = built
Try = Callable[[], bool]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "vlmserve" / "kernels.json"


@pytest.fixture
def cpuinfo(tmp_path: Path) -> Path:
    path = tmp_path / "cpuinfo"
    path.write_text("processor : 0\nmodel name : One\nflags : avx2\n")
    return path


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the next products take, ours and torch's in turn; reading past the end is a trial too many."""
    left: list[float] = []
    monkeypatch.setattr(trials, "UNCACHED_BYTES", 2**20)
    monkeypatch.setattr(trials, "seconds_of", lambda product, x: left.pop(0))
    return left


def start(cpuinfo: Path, dtype: torch.dtype = torch.float32) -> bool:
    """The answer of a process that starts now."""
    return trials.is_as_fast_as_torch.__wrapped__("avx2", dtype, cpuinfo)


def test_kernels_are_timed_with_few_and_many_rows(file: Path, cpuinfo: Path, seconds: list[float]) -> None:
    seconds[:] = [1.0, 2.0, 1.0, 0.5]
    assert not start(cpuinfo)
    file.unlink()
    seconds[:] = [1.0, 1.0, 1.0, 1.0]
    assert start(cpuinfo)


@pytest.mark.parametrize("faster", [True, False])
def test_a_later_start_does_not_try_again(faster: bool, file: Path, cpuinfo: Path, seconds: list[float]) -> None:
    seconds[:] = [1.0, 2.0, 1.0, 2.0] if faster else [2.0, 1.0]
    assert start(cpuinfo) is faster
    assert start(cpuinfo) is faster
    assert seconds == []


def test_each_processor_and_dtype_has_its_trial(file: Path, cpuinfo: Path, seconds: list[float]) -> None:
    seconds[:] = [1.0, 2.0, 1.0, 2.0]
    assert start(cpuinfo)
    seconds[:] = [2.0, 1.0]
    assert not start(cpuinfo, torch.bfloat16)
    cpuinfo.write_text(cpuinfo.read_text().replace("One", "Two"))
    seconds[:] = [2.0, 1.0]
    assert not start(cpuinfo)
    assert len(trials.KNOWN.facts) == 3


def test_a_broken_file_is_written_anew(
    file: Path, cpuinfo: Path, seconds: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    file.parent.mkdir()
    file.write_text("{")
    seconds[:] = [1.0, 2.0, 1.0, 2.0]
    with caplog.at_level(logging.WARNING):
        assert start(cpuinfo)
    assert "cannot be read" in caplog.text
    assert start(cpuinfo)


def test_where_nothing_can_be_written_each_start_tries(
    file: Path, cpuinfo: Path, seconds: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    file.parent.write_text("not a folder")
    seconds[:] = [1.0, 2.0, 1.0, 2.0] * 2
    with caplog.at_level(logging.INFO):
        assert start(cpuinfo)
        assert start(cpuinfo)
    assert "not remembered" in caplog.text
    assert seconds == []


def test_a_real_trial_answers(file: Path) -> None:
    assert trials.is_as_fast_as_torch.__wrapped__("avx2", torch.float32) in (True, False)
    assert len(trials.KNOWN.facts) == 1


def test_superblocks_must_not_be_slower_in_any_trial(file: Path, cpuinfo: Path, seconds: list[float]) -> None:
    """One row and many rows of Q4_K by superblocks, then repacked; then Q6_K."""
    start = partial(trials.superblocks_are_as_fast.__wrapped__, "avx512_vnni", cpuinfo)
    seconds[:] = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.9]
    assert not start()
    assert not start()
    file.unlink()
    seconds[:] = [1.0, 1.0, 1.1, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert start()
    file.unlink()
    seconds[:] = [1.1, 1.0, 1.0, 1.0]
    assert not start()
    assert seconds == []


def test_a_real_trial_of_superblocks_answers(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not extension().has_superblocks():
        pytest.skip("no integer products")
    monkeypatch.setattr(trials, "UNCACHED_BYTES", 2**20)
    assert trials.superblocks_are_as_fast.__wrapped__("avx512_vnni") in (True, False)
    assert len(trials.KNOWN.facts) == 1
