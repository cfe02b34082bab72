"""How the GPU benchmark times calls, and what it counts that they have to do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu_timing
from benchmarks.gpu_decode import random_model
from benchmarks.gpu_stages import BLOCK_SIZE, TINY
from benchmarks.gpu_timing import copies, per_launch
from benchmarks.gpu_work import decode_work, prompt_work
from vlmserve.models.decoder import Decoder

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_on_a_cpu_calls_follow_each_other() -> None:
    called: list[int] = []
    launch = per_launch([lambda: called.append(1), lambda: called.append(2)], CPU, 3)
    assert called == [1, 2] * 4
    assert set(launch.named("microseconds")) == {"microseconds"}


def test_copies_do_not_fit_into_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=1000))
    original = torch.randn(100)
    turns = copies(original, original.nbytes, CUDA)
    assert sum(turn.nbytes for turn in turns) >= 4 * 1000 > sum(turn.nbytes for turn in turns[1:])
    assert len({turn.data_ptr() for turn in turns}) == len(turns)
    assert all(torch.equal(turn, original) for turn in turns)
    assert len(copies(original, 10**6, CUDA)) == 1


def test_uncapturable_calls_run_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*_: object) -> None:
        raise gpu_timing.CannotCaptureError("OutOfMemoryError: 1 GiB")

    monkeypatch.setattr(gpu_timing, "capture", cannot)
    monkeypatch.setattr(gpu_timing, "wait", lambda _: None)
    called: list[int] = []
    launch = per_launch([lambda: called.append(1)], CUDA, 3)
    assert len(called) == gpu_timing.CALLS * 4
    assert launch.named("microseconds")["microseconds, note"] == "not captured: OutOfMemoryError: 1 GiB"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_waiting_calls_are_not_captured() -> None:
    x = torch.ones(1000, device=CUDA)
    launches = [per_launch([lambda: x + 1], CUDA, 3), per_launch([lambda: x.sum().item()], CUDA, 3)]
    launches.append(per_launch([lambda: x + 1], CUDA, 3))
    assert [bool(launch.note) for launch in launches] == [False, True, False]
    assert all(launch.seconds > 0 for launch in launches)
    assert float((x + 1).sum()) == 2000


def test_work_counts_operations_and_bytes() -> None:
    model = random_model(CPU, TINY, "none", eager=True)
    decoder = model.language_model
    assert isinstance(decoder, Decoder)
    hidden, inner, vocabulary, layers = 64, 128, 256, 2
    # Two of four heads have keys and values.
    weights = layers * (3 * hidden * hidden + 3 * hidden * inner) + vocabulary * hidden
    norms = (2 * layers + 1) * hidden
    work = decode_work(decoder, 3, 10, BLOCK_SIZE)
    assert work.flops == 2 * 3 * (weights + layers * 2 * 10 * hidden)
    assert work.num_bytes == 4 * (weights + norms + 3 * 10 * layers * hidden)
    prompt = prompt_work(decoder, 4, requests=5)
    head = vocabulary * hidden
    assert prompt.flops == 2 * 5 * (4 * (weights - head) + head + layers * 2 * (1 + 2 + 3 + 4) * hidden)
    assert prompt.num_bytes == 4 * (weights + norms)
