"""LFM2-VL's tower and projector against transformers' own, for parts of several sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Lfm2VlForConditionalGeneration

from tests.checkpoints import rename_tensors
from tests.lfm2_checkpoints import make_lfm2_vl
from tests.models.test_decoder import load
from vlmserve.errors import InvalidImageError, ModelLoadError, UnsupportedModelError
from vlmserve.types import SquareGrids

VARIANTS: dict[str, dict[str, Any]] = {
    "as published": {"projector_use_layernorm": False},
    "with a norm": {"vision": {"num_patches": 16, "hidden_act": "gelu"}},
    "nine patches to one": {"downsample_factor": 3, "projector_bias": False},
}
IMAGES = [((3, 4),), ((2, 2), (2, 2), (2, 2), (1, 5)), ((7, 1),)]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
@torch.inference_mode()
def test_embeddings_equal_transformers(tmp_path: Path, overrides: dict[str, Any]) -> None:
    folder = make_lfm2_vl(tmp_path, **overrides)
    theirs = Lfm2VlForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    vision = load(folder).vision
    assert vision is not None
    merge = theirs.config.downsample_factor
    generator = torch.Generator().manual_seed(1)
    pixels, expected = [], []
    for grids in IMAGES:
        parts = []
        for rows, columns in grids:
            image = torch.randn(rows * merge, 4, columns * merge, 4, 3, generator=generator)
            squares = image.view(rows, 4 * merge, columns, 4 * merge, 3)
            parts.append(squares.permute(0, 2, 4, 1, 3).reshape(-1, 3, 4 * merge, 4 * merge))
            patches = image.transpose(1, 2).reshape(1, -1, 48)
            expected += theirs.model.get_image_features(
                patches,
                spatial_shapes=torch.tensor([[rows * merge, columns * merge]]),
                pixel_attention_mask=torch.ones(1, patches.shape[1], dtype=torch.int32),
            ).pooler_output
        pixels.append(torch.cat(parts))
    tilings = [SquareGrids(grids) for grids in IMAGES]
    encoded = vision.encode(pixels, tilings)
    torch.testing.assert_close(torch.cat(encoded), torch.cat(expected), atol=1e-4, rtol=1e-4)
    for own, tiling, image in zip(encoded, tilings, pixels, strict=True):
        vision.check(tuple(image.shape), len(own), tiling)
        assert vision.products(tuple(image.shape), tiling) > 0


def test_published_names_mean_the_same_weights(tmp_path: Path) -> None:
    folders = [make_lfm2_vl(tmp_path / name) for name in ("flat", "published")]
    rename_tensors(folders[1], lambda name: name.replace("vision_tower.", "vision_tower.vision_model."))
    pixels = [torch.ones(4, 3, 8, 8)]
    flat, published = (load(folder).vision for folder in folders)
    assert flat is not None
    assert published is not None
    assert torch.equal(flat.encode(pixels)[0], published.encode(pixels)[0])


def test_other_pixels_are_rejected(tmp_path: Path) -> None:
    vision = load(make_lfm2_vl(tmp_path)).vision
    assert vision is not None
    with pytest.raises(InvalidImageError, match=r"takes squares of \(3, 8, 8\), not of \(3, 16, 8\)"):
        vision.check((4, 3, 16, 8), 4)
    for squares, tokens, error in ((4, 5, "4 embeddings and has 5"), (6, 6, "6 squares and makes 4 embeddings")):
        with pytest.raises(InvalidImageError, match=error):
            vision.check((squares, 3, 8, 8), tokens, SquareGrids(((2, 2),)))


@pytest.mark.parametrize(
    ("vision", "error", "message"),
    [
        ({"num_patches": 12}, ModelLoadError, "num_patches of the vision tower is 12, not a square number"),
        ({"hidden_act": "mish"}, UnsupportedModelError, "mish"),
    ],
)
def test_impossible_towers_are_rejected(
    tmp_path: Path, vision: dict[str, Any], error: type[Exception], message: str
) -> None:
    folder = make_lfm2_vl(tmp_path, vision=vision)
    with pytest.raises(error, match=message):
        load(folder)
