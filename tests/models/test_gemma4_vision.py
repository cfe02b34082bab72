"""Gemma 4's tower and image processor against transformers, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.gemma4 import image_inputs, make_gemma4, make_unified, open_theirs
from tests.models.test_llava import load
from vlmserve.errors import InvalidImageError, InvalidRequestError
from vlmserve.levels import Levels
from vlmserve.media.budget import ImageBudget
from vlmserve.media.images import DecodedImage
from vlmserve.media.pooled import BUDGETS, PooledProcessor, PooledRecipe, UnifiedProcessor

SIZES = [(40, 30), (20, 60), (500, 3), (64, 64), (7, 900)]


def make_image(width: int, height: int) -> Image.Image:
    levels = np.random.default_rng([width, height]).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(levels)


def processor(budget: int = 70, patch: int = 4, pool: int = 2) -> PooledProcessor:
    return PooledProcessor(
        PooledRecipe(patch, pool, budget, resample=3, levels=Levels(1 / 255, (0.5,) * 3, (0.5,) * 3)), (1, 2)
    )


def normed(processor: PooledProcessor, image: Image.Image) -> torch.Tensor:
    pixels, _ = processor.prepare(DecodedImage.whole(image))
    return torch.from_numpy(pixels).float() / 255 * 2 - 1


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "vision",
    [
        {},
        {"use_clipped_linears": True},
        {"standardize": True, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8},
    ],
    ids=["plain", "clipped", "standardized"],
)
@torch.inference_mode()
def test_embeddings_equal_those_of_transformers(tmp_path: Path, vision: dict[str, Any]) -> None:
    folder = make_gemma4(tmp_path, vision=vision)
    theirs, tower = open_theirs(folder), load(folder).vision
    assert tower is not None
    images = [make_image(*size) for size in SIZES]
    expected = theirs.model.get_image_features(**image_inputs(images)).pooler_output
    pixels = [normed(processor(), image) for image in images]
    for one, ours, features in zip(pixels, tower.encode(pixels), expected, strict=True):
        assert features.std(0).mean() > 0.02, "places differ"
        torch.testing.assert_close(ours, features, atol=1e-4, rtol=1e-4)
        tower.check(tuple(one.shape), len(features))
    assert tower.encode([]) == []


@torch.inference_mode()
def test_squares_without_a_tower_equal_those_of_transformers(tmp_path: Path) -> None:
    folder = make_unified(tmp_path)
    theirs, vision = open_theirs(folder), load(folder).vision
    assert vision is not None
    images = [make_image(*size) for size in SIZES]
    expected = theirs.model.get_image_features(**image_inputs(images, unified=True)).pooler_output
    own = UnifiedProcessor(PooledRecipe(4, 2, 70, resample=3, levels=Levels(1 / 255, (0.0,) * 3, (1.0,) * 3)), (1, 2))
    pixels = [torch.from_numpy(own.prepare(DecodedImage.whole(image))[0]).float() / 255 for image in images]
    assert own.levels.mean == (0, 0, 0)
    for one, ours, features in zip(pixels, vision.encode(pixels), expected, strict=True):
        assert features.std(0).mean() > 0.02, "places differ"
        torch.testing.assert_close(ours, features, atol=1e-4, rtol=1e-4)
        vision.check(tuple(one.shape), len(features))


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("size", [*SIZES, (1234, 777), (31, 4000)])
def test_pixels_equal_those_of_transformers(budget: int, size: tuple[int, int]) -> None:
    image, own = make_image(*size), processor(budget, 16, 3)
    theirs = image_inputs([image], patch_size=16, pooling_kernel_size=3, max_soft_tokens=budget)
    pixels, taken = own.prepare(DecodedImage.whole(image))
    _, channels, height, width = pixels.shape
    patches = pixels.reshape(channels, height // 16, 16, width // 16, 16).transpose(1, 3, 2, 4, 0)
    count = height * width // 256
    np.testing.assert_allclose(theirs["pixel_values"][0, :count], patches.reshape(count, -1) / 255, atol=1e-6)
    assert int((theirs["image_position_ids"] >= 0).all(-1).sum()) == count == 9 * (taken.num_tokens - 2)


def test_budgets_of_requests_choose_trained_sizes() -> None:
    own, image = processor(280), DecodedImage.whole(make_image(300, 300))

    def tokens(**bounds: Any) -> int:
        return own.within(ImageBudget(**bounds)).prepare(image)[1].num_tokens

    assert tokens(max_tokens=200) == tokens(max_pixels=140 * 64) == 11 * 11 + 2
    assert tokens(low_detail=True) == 8 * 8 + 2
    assert tokens() == tokens(high_detail=True) == 16 * 16 + 2
    with pytest.raises(InvalidRequestError, match="at least 72 tokens"):
        own.within(ImageBudget(max_tokens=71))
    with pytest.raises(InvalidRequestError, match="at most 17,920 pixels"):
        own.within(ImageBudget(min_pixels=20_000))


def test_pixels_of_other_shapes_are_rejected(tmp_path: Path) -> None:
    tower = load(make_gemma4(tmp_path)).vision
    assert tower is not None
    for shape, count in (((1, 3, 8, 12), 1), ((1, 3, 8, 16), 3), ((1, 3, 0, 8), 0), ((1, 3, 8, 648), 81)):
        with pytest.raises(InvalidImageError):
            tower.check(shape, count)
