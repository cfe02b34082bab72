"""Vision towers in stages: the same embeddings however finely they are divided."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.blip import make_blip
from tests.checkpoints import make_gemma3, make_idefics3, make_llava, make_llava_next, make_qwen_vl
from tests.models.test_decoder import load
from tests.moondream import make_moondream
from tests.original_checkpoints import make_qwen_vl as make_resampled
from vlmserve.layers.encoder_attention import EncoderAttention
from vlmserve.layers.stages import by_rows, run_stages
from vlmserve.models.protocols import VisionEncoder
from vlmserve.types import Tiling, TowerInputs

pytestmark = pytest.mark.usefixtures("kernels")

MAKERS: dict[str, Callable[[Path], object]] = {
    "llava": make_llava,
    "llava next": make_llava_next,
    "idefics3": make_idefics3,
    "gemma3": make_gemma3,
    "qwen2-vl": lambda folder: make_qwen_vl(folder, "qwen2_vl"),
    "qwen2.5-vl": lambda folder: make_qwen_vl(folder, "qwen2_5_vl"),
    "first qwen-vl": make_resampled,
    "blip": make_blip,
    "moondream": make_moondream,
}


def sample_images(name: str, vision: VisionEncoder) -> list[tuple[Tensor, TowerInputs | None]]:
    """A small one, and one of several tiles or frames where there are such."""
    assert vision.example_shape is not None
    tiles, channels, height, width = vision.example_shape
    shapes: list[tuple[tuple[int, ...], TowerInputs | None]] = [((tiles, channels, height, width), None)]
    if name == "llava next":
        shapes.append(((7, channels, height, width), Tiling(2, 3, 4, 12)))
    elif name == "idefics3":
        shapes.append(((19, channels, height, width), None))
    elif name.startswith("qwen2"):
        shapes.append(((5, channels, height // 2, width), None))
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(shape, generator=generator), tiling) for shape, tiling in shapes]


@pytest.mark.parametrize("name", MAKERS)
@torch.inference_mode()
def test_embeddings_are_the_same_in_stages_of_any_size(name: str, tmp_path: Path) -> None:
    MAKERS[name](tmp_path)
    vision = load(tmp_path).vision
    assert vision is not None
    for pixels, tiling in sample_images(name, vision):
        products = vision.products(tuple(pixels.shape), tiling)
        [whole] = vision.encode([pixels], [tiling])
        assert whole.isfinite().all()
        sizes = []
        for limit in (math.inf, products / 10, 2000.0, 1.0):
            stages = vision.in_stages([pixels], [tiling], limit)
            made = []
            while True:
                try:
                    made.append(next(stages))
                except StopIteration as end:
                    [embeddings] = end.value
                    break
            assert sum(made) == products
            torch.testing.assert_close(embeddings, whole, atol=1e-5, rtol=1e-5)
            sizes.append((len(made), max(made)))
        assert sorted(sizes) == sizes, "more stages of a smaller limit"
        assert sizes[-1][0] > 4 * sizes[0][0]
        assert sizes[-1][1] < products / 2, "patches of one tile, or the pooling of one image, are one stage"


@torch.inference_mode()
def test_all_heads_alone_are_all_heads_together() -> None:
    attention = EncoderAttention(48, 3, dtype=torch.float32)
    qkv = torch.randn(2, 10, 144)
    one_by_one = attention.in_stages(qkv, attention.products(10) - 1)
    assert len(list(attention.in_stages(qkv, attention.products(10) - 1))) == 6
    torch.testing.assert_close(run_stages(one_by_one), attention(qkv))


def test_rows_are_divided_evenly() -> None:
    rows = torch.arange(10.0)
    stages = by_rows(lambda x: 2 * x, 3, 9, rows)
    assert list(stages) == [9, 9, 9, 3]
    assert list(by_rows(lambda x: x, 3, 18, rows)) == [15, 15]
    assert list(by_rows(lambda x: x, 3, 1, rows)) == [3] * 10
    assert torch.equal(run_stages(by_rows(lambda x: 2 * x, 3, 9, rows)), 2 * rows)
