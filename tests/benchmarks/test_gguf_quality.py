"""The divergence of a GGUF file's predictions from a reference."""

from __future__ import annotations

import math

import torch

from benchmarks.gguf_quality import row


def test_divergence_is_that_of_reference_from_model() -> None:
    reference = torch.tensor([[0.5, 0.5], [0.75, 0.25]]).log()
    own = torch.tensor([[0.25, 0.75], [0.75, 0.25]]).log()
    expected = (0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)) / 2
    assert row("own", reference, own) == ["own", round(expected, 5), round(1.98 * expected, 4), 50.0]
    assert row("same", reference, reference) == ["same", 0.0, 0.0, 100.0]
