"""The vision side of the first Qwen-VL against its architecture written out in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.test_decoder import load
from tests.oracles.original_decoders import Qwen
from tests.oracles.qwen_vl_vision import QwenVLVision
from tests.original_checkpoints import VISUAL, make_qwen, make_qwen_vl
from vlmserve.errors import InvalidImageError, ModelLoadError
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.registry import load_model
from vlmserve.models.vision.resampled import ResampledVision

pytestmark = pytest.mark.usefixtures("kernels")

VISUALS: dict[str, dict[str, Any]] = {
    "positions to be interpolated": {},
    "as many positions as trained": {"image_size": 64},
    "a tower as wide as the decoder": {"width": 128, "heads": 4, "layers": 1},
    "patches fewer than queries": {"image_size": 16, "n_queries": 25},
}


def encoder(folder: Path) -> ResampledVision:
    vision = load(folder).vision
    assert isinstance(vision, ResampledVision)
    return vision


def pixels(seed: int, side: int = VISUAL["image_size"]) -> torch.Tensor:
    return torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("visual", VISUALS.values(), ids=VISUALS)
@torch.inference_mode()
def test_embeddings_equal_those_of_the_architecture(tmp_path: Path, visual: dict[str, Any]) -> None:
    folder = make_qwen_vl(tmp_path, visual=visual)
    oracle = Qwen(folder)
    theirs = QwenVLVision(oracle.tensors, oracle.config["visual"])
    ours = encoder(folder)
    images = [pixels(seed, oracle.config["visual"]["image_size"]) for seed in range(2)]
    actual = ours.encode(images)
    for image, embeddings in zip(images, actual, strict=True):
        expected = theirs.encode(image[0]).float()
        torch.testing.assert_close(embeddings, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ours.encode([image])[0], expected, atol=1e-4, rtol=1e-4)
        ours.check(tuple(image.shape), len(expected))
    assert (actual[0] - actual[1]).abs().max() > 0.1


@torch.inference_mode()
def test_bfloat16_stays_near(tmp_path: Path) -> None:
    folder = make_qwen_vl(tmp_path)
    rounded = load_model(folder, LoadSettings(device=torch.device("cpu"), dtype=torch.bfloat16)).vision
    assert rounded is not None
    (expected,), (actual,) = encoder(folder).encode([pixels(0)]), rounded.encode([pixels(0)])
    assert torch.nn.functional.cosine_similarity(actual.float(), expected).min() > 0.99


def test_a_qwen_without_a_visual_section_sees_nothing(tmp_path: Path) -> None:
    loaded = load(make_qwen(tmp_path))
    assert (loaded.vision, loaded.image_token_id) == (None, None)


def test_placeholders_lie_between_image_ends(tmp_path: Path) -> None:
    assert load(make_qwen_vl(tmp_path, visual={"image_start_id": 500})).image_token_id == 502


def test_pixels_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    vision = encoder(make_qwen_vl(tmp_path))
    for shape in [(1, 3, 80, 76), (2, 3, 80, 80), (1, 4, 80, 80)]:
        with pytest.raises(InvalidImageError, match=r"takes images of \(1, 3, 80, 80\)"):
            vision.check(shape, 4)
    with pytest.raises(InvalidImageError, match="makes 4 embeddings and has 5"):
        vision.check((1, 3, 80, 80), 5)


@pytest.mark.parametrize("visual", [{"heads": 3}, {"output_dim": 256}, {"n_queries": 5}], ids=str)
def test_sizes_that_do_not_fit_are_refused(tmp_path: Path, visual: dict[str, Any]) -> None:
    folder = make_qwen_vl(tmp_path)
    config = Qwen(folder).config
    (folder / "config.json").write_text(json.dumps({**config, "visual": {**config["visual"], **visual}}))
    with pytest.raises(ModelLoadError, match="do not fit a tower"):
        load(folder)
