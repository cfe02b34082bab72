"""Vision towers by the kernels, beside the same by torch's operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from tests.checkpoints import make_internvl, make_llava, make_mistral3, make_qwen_vl
from tests.kernels.triton.interpreted import InterpretedDevice, loaded, randomize_norms
from vlmserve.devices.device import Device
from vlmserve.kernels.triton.norm import TritonNorm
from vlmserve.layers.stages import StageBudget
from vlmserve.models.protocols import VisionEncoder
from vlmserve.models.vision.staged import StagedLayer

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels are not interpreted where there is a GPU"
)
MAKERS: dict[str, Callable[[Path], object]] = {
    "llava": make_llava,
    "internvl": make_internvl,
    "mistral3": make_mistral3,
    "qwen2-vl": lambda folder: make_qwen_vl(folder, "qwen2_vl"),
    "qwen3-vl": lambda folder: make_qwen_vl(folder, "qwen3_vl"),
}
ANY_SIZE = {"mistral3", "qwen2-vl", "qwen3-vl"}
"""Towers that take small images, too."""


def tower(folder: Path, device: type[Device]) -> VisionEncoder:
    """With random weights of norms."""
    vision = loaded(folder, device).vision
    assert isinstance(vision, torch.nn.Module)
    randomize_norms(vision, device)
    return vision


def embeddings(vision: VisionEncoder, pixels: Tensor, allowed: float) -> Tensor:
    """Computed in stages of so many multiplications."""
    budget = StageBudget(allowed)
    stages = vision.in_stages([pixels], [None], budget)
    while True:
        try:
            next(stages)
        except StopIteration as end:
            [result] = end.value
            return result
        budget.left += allowed


@pytest.mark.parametrize("name", MAKERS)
@torch.inference_mode()
def test_embeddings_are_those_of_torchs_operations(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MAKERS[name](tmp_path)
    ours, theirs = (tower(tmp_path, device) for device in (InterpretedDevice, Device))
    assert ours.example_shape is not None
    *first, height, width = ours.example_shape
    # The interpreter takes long for large ones.
    smaller = 4 if name in ANY_SIZE else 1
    shape = (*first, height // smaller, width // smaller)
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = embeddings(theirs, pixels, math.inf)
    sums = []
    of_sum = TritonNorm.of_sum

    def counted(*arguments: Tensor) -> object:
        sums.append(arguments)
        return of_sum(*arguments)

    monkeypatch.setattr(TritonNorm, "of_sum", counted)
    torch.testing.assert_close(embeddings(ours, pixels, math.inf), expected, atol=1e-4, rtol=1e-3)
    # Between attention and MLP, and from each layer to the next one; InternVL scales what it adds.
    layers = sum(isinstance(module, StagedLayer) for module in cast(torch.nn.Module, ours).modules())
    whole = len(sums)
    assert whole == (0 if name == "internvl" else 2 * layers - 1)
    in_parts = embeddings(ours, pixels, ours.products(shape) / 10)
    torch.testing.assert_close(in_parts, expected, atol=1e-4, rtol=1e-3)
    assert len(sums) >= 2 * whole
