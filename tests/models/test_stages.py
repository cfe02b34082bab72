"""Vision towers in stages: the same embeddings however finely they are divided."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.blip import make_blip
from tests.checkpoints import (
    make_gemma3,
    make_idefics3,
    make_internvl,
    make_llava,
    make_llava_next,
    make_mistral3,
    make_qwen_vl,
)
from tests.engine.kinds import by_kernels
from tests.engine.test_qwen_vl import make_oracle
from tests.lfm2_checkpoints import make_lfm2_vl
from tests.minicpmv_checkpoints import make_minicpmv
from tests.models.test_decoder import load
from tests.moondream import make_moondream
from tests.ocr_checkpoints import make_glm_ocr, make_paddleocr
from tests.original_checkpoints import make_qwen_vl as make_resampled
from vlmserve.layers.encoder_attention import EncoderAttention
from vlmserve.layers.stages import StageBudget, Stages, T, by_rows
from vlmserve.models.protocols import VisionEncoder
from vlmserve.types import Pieces, Tiling, TowerInputs

MAKERS: dict[str, Callable[[Path], object]] = {
    "llava": make_llava,
    "llava next": make_llava_next,
    "idefics3": make_idefics3,
    "internvl": make_internvl,
    "mistral3": make_mistral3,
    "gemma3": make_gemma3,
    "qwen2-vl": lambda folder: make_qwen_vl(folder, "qwen2_vl"),
    "qwen2.5-vl": lambda folder: make_qwen_vl(folder, "qwen2_5_vl"),
    "qwen3-vl": lambda folder: make_qwen_vl(folder, "qwen3_vl"),
    "glm-ocr": make_glm_ocr,
    "paddleocr-vl": make_paddleocr,
    "first qwen-vl": make_resampled,
    "blip": make_blip,
    "moondream": make_moondream,
    "lfm2-vl": make_lfm2_vl,
    "lfm3-vl": lambda folder: make_oracle(folder, "lfm3_vl"),
    "minicpm-v": make_minicpmv,
}


def sample_images(name: str, vision: VisionEncoder) -> list[tuple[Tensor, TowerInputs | None]]:
    """A small one, and one of several tiles or frames where there are such."""
    assert vision.example_shape is not None
    tiles, channels, height, width = vision.example_shape
    shapes: list[tuple[tuple[int, ...], TowerInputs | None]] = [((tiles, channels, height, width), None)]
    if name == "llava next":
        shapes.append(((7, channels, height, width), Tiling(2, 3, 4, 12)))
    elif name in ("idefics3", "internvl"):
        shapes.append(((19, channels, height, width), None))
    elif name == "mistral3":
        shapes.append(((1, channels, height // 2, width), None))
    elif name == "minicpm-v":
        shapes.append(((1, channels, 4, 4 * 96), Pieces(((8, 4), (8, 4), (4, 8)))))
    elif name.startswith(("qwen", "glm", "paddle", "lfm3")):
        shapes.append(((5, channels, height // 2, width), None))
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(shape, generator=generator), tiling) for shape, tiling in shapes]


def made_in(stages: Stages[T], budget: StageBudget, products: float) -> tuple[T, list[int]]:
    """The result, and multiplications of each step, if each step may make so many more."""
    made = []
    while True:
        before = budget.made
        budget.left += products
        try:
            next(stages)
        except StopIteration as end:
            return end.value, [*made, budget.made - before]
        made.append(budget.made - before)


OF_TORCH = ("llava next", "qwen2.5-vl", "qwen3-vl", "first qwen-vl", "blip", "moondream")
"""Each kind of stages by torch's kernels, which divide attention in the same way in all towers."""


@by_kernels("name", native=[*MAKERS], torch=OF_TORCH)
@torch.inference_mode()
def test_stages_give_the_same_embeddings(name: str, tmp_path: Path) -> None:
    MAKERS[name](tmp_path)
    vision = load(tmp_path).vision
    assert vision is not None
    for pixels, tiling in sample_images(name, vision):
        products = vision.products(tuple(pixels.shape), tiling)
        [whole] = vision.encode([pixels], [tiling])
        assert whole.isfinite().all()
        steps = []
        for allowed in (math.inf, products / 10, 20000.0):
            budget = StageBudget(0)
            [embeddings], made = made_in(vision.in_stages([pixels], [tiling], budget), budget, allowed)
            assert sum(made) == products
            torch.testing.assert_close(embeddings, whole, atol=1e-5, rtol=1e-5)
            steps.append(made)
        assert len(steps[0]) == 1
        assert len(steps[1]) >= 10
        assert len(steps[2]) >= products / 20000
        assert max(steps[2]) < products / 2, "patches of one tile, or the pooling of one image, are one stage"


@pytest.mark.parametrize("queries", [1, 3, 10, 14, 47, 90])
@torch.inference_mode()
def test_attention_in_parts_equals_attention_at_once(queries: int) -> None:
    attention = EncoderAttention(48, 3, dtype=torch.float32)
    qkv = torch.randn(3, 10, 144)
    one = attention.products(10) // 30
    budget = StageBudget(0)
    attended, made = made_in(attention.in_stages(qkv, budget), budget, queries * one)
    assert made == [queries * one] * (90 // queries) + [90 % queries * one] * (90 % queries > 0)
    torch.testing.assert_close(attended, attention(qkv))


@torch.inference_mode()
def test_a_large_heads_attention_takes_several_stages() -> None:
    attention = EncoderAttention(16, 1, dtype=torch.float32)
    qkv = torch.randn(1, 700, 48)
    budget = StageBudget(0, least=96 * 700, rows=96)
    attended, made = made_in(attention.in_stages(qkv, budget), budget, attention.products(700) / 7)
    assert len(made) == 7
    torch.testing.assert_close(attended, attention(qkv))


def test_stages_are_as_large_as_the_budget_allows() -> None:
    rows = torch.arange(10.0)

    def made(allowed: float, least: int = 1, multiple: int = 1) -> list[int]:
        budget = StageBudget(0, least=least, rows=multiple)
        doubled, steps = made_in(by_rows(lambda x: 2 * x, 3, budget, rows), budget, allowed)
        assert torch.equal(doubled, 2 * rows)
        return steps

    assert made(math.inf) == [30]
    assert made(9) == [9, 9, 9, 3]
    assert made(10) == [9, 9, 12], "what is left of a step is kept"
    assert made(1) == [0, 0, 3] * 10
    assert made(9, least=12) == [0, 18, 0, 12], "too few rows wait for another step, but the last ones"
    assert made(9, multiple=4) == [0, 12, 12, 6], "a weight is read for four rows at a time"
