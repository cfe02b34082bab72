"""Recordings, in place of graphs: what they repeat, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ptx.recording import RecordingCapture, Stale, Unrecordable


def test_calls_are_repeated_over_the_same_memory() -> None:
    x, kept = torch.ones(4), torch.zeros(4)

    def run() -> Tensor:
        doubled = torch.empty_like(x)
        doubled[:2] = x[:2] * 2
        doubled[2:].copy_(x[2:])
        kept.add_(doubled)
        return doubled.view(2, 2) + 1

    repeat = RecordingCapture()(run)
    kept.zero_()
    for number in (3.0, 5.0):
        x.fill_(number)
        assert torch.equal(repeat(), torch.tensor([[2 * number + 1] * 2, [number + 1] * 2]))
    assert torch.equal(kept, torch.tensor([16.0, 16.0, 8.0, 8.0]))


def test_python_is_not_repeated() -> None:
    x, factors = torch.ones(2), iter([2.0, 3.0, 4.0])
    repeat = RecordingCapture()(lambda: x * next(factors))
    assert torch.equal(repeat(), torch.full((2,), 3.0))


def test_others_use_the_memory_between_repetitions() -> None:
    capture, x = RecordingCapture(), torch.ones(2)
    first, second = capture(lambda: x + 1), capture(lambda: x + 2)
    result = first()
    assert torch.equal(result, torch.full((2,), 2.0))
    second()
    assert result.isnan().all()


def test_memory_that_nobody_keeps_is_missed() -> None:
    capture = RecordingCapture()
    outside = [torch.ones(2)]
    repeat = capture(lambda: outside[-1] + 1)
    repeat()
    outside.clear()
    with pytest.raises(Stale, match=r"shape \(2,\)"):
        repeat()


@pytest.mark.parametrize("read", [Tensor.item, Tensor.tolist, Tensor.nonzero])
def test_results_for_the_host_are_refused(read: object) -> None:
    x = torch.ones(1)

    def run() -> Tensor:
        read(x + 1)  # type: ignore[operator]
        return x

    with pytest.raises(Unrecordable, match="waits for the device"):
        RecordingCapture()(run)
