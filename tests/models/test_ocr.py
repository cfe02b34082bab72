"""The vision towers and mergers of GLM-OCR, GLM-4.1V and PaddleOCR-VL against transformers, in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.checkpoints import change_config
from tests.models.test_llava import load
from tests.ocr_checkpoints import make_glm4v, make_glm_ocr, make_paddleocr, rows_of
from vlmserve.errors import InvalidImageError, ModelLoadError, UnsupportedModelError
from vlmserve.models.quantized import save_quantized
from vlmserve.settings.quantization import QuantizationConfig

pytestmark = pytest.mark.usefixtures("kernels")

Make = Callable[[Path], Path]
VARIANTS: dict[str, Make] = {
    "GLM-OCR": make_glm_ocr,
    "GLM-OCR without biases, of another base, merged by three": lambda folder: make_glm_ocr(
        folder,
        vision={
            "attention_bias": False, "spatial_merge_size": 3, "hidden_act": "gelu", "rms_norm_eps": 1e-3,
            "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
        },
    ),
    "GLM-4.1V": partial(make_glm4v, kind="Glm4v"),
    "PaddleOCR-VL": make_paddleocr,
    "PaddleOCR-VL, published names, of another base, merged by three": lambda folder: make_paddleocr(
        folder,
        vision={
            "spatial_merge_size": 3, "hidden_act": "gelu", "layer_norm_eps": 1e-3, "image_size": 40,
            "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
        },
        published_names=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("make", VARIANTS.values(), ids=VARIANTS)
@torch.inference_mode()
def test_embeddings_equal_those_of_transformers(tmp_path: Path, make: Make) -> None:
    folder = make(tmp_path)
    theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    vision = load(folder).vision
    assert vision is not None
    config = theirs.config.vision_config
    side = config.patch_size * config.spatial_merge_size
    generator = torch.Generator().manual_seed(1)
    images = [
        torch.randn(1, 3, down * side, across * side, generator=generator) for down, across in ((1, 2), (5, 2), (3, 8))
    ]
    for pixels, ours in zip(images, vision.encode(images), strict=True):
        rows, grid = rows_of(pixels, config)
        [features] = theirs.model.get_image_features(rows, image_grid_thw=grid).pooler_output
        assert features.abs().max() > 0.1
        assert features.std(0).mean() > 0.02, "places differ"
        torch.testing.assert_close(ours, features, atol=1e-4, rtol=1e-4)
        vision.check(tuple(pixels.shape), len(features))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {"GLM-OCR": make_glm_ocr, "PaddleOCR-VL": make_paddleocr}
    return {kind: make(tmp_path_factory.mktemp("model")) for kind, make in made.items()}


@pytest.mark.parametrize("shape", [(1, 3, 12, 16), (1, 4, 16, 16), (3, 16, 16), (1, 3, 0, 8)], ids=str)
def test_pixels_that_are_no_whole_squares_are_refused(folders: dict[str, Path], shape: tuple[int, ...]) -> None:
    for folder in folders.values():
        vision = load(folder).vision
        assert vision is not None
        with pytest.raises(InvalidImageError, match="whole squares of 8 pixels"):
            vision.check(shape, 4)
        with pytest.raises(InvalidImageError, match="6 embeddings and has 4"):
            vision.check((1, 3, 16, 24), 4)


@pytest.mark.parametrize(
    ("fields", "error", "word"),
    [
        ({"model_type": "siglip_vision_model"}, UnsupportedModelError, "siglip_vision_model"),
        ({"model_type": "glm_ocr_vision", "num_heads": 3}, ModelLoadError, "3 heads"),
        ({"model_type": "glm_ocr_vision", "hidden_size": 28, "num_heads": 2}, ModelLoadError, "multiples of 4"),
    ],
)
def test_unimplemented_towers_are_rejected(
    folders: dict[str, Path], tmp_path: Path, fields: dict[str, Any], error: type[Exception], word: str
) -> None:
    (tmp_path / "config.json").write_text((folders["GLM-OCR"] / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(folders["GLM-OCR"] / "model.safetensors")
    change_config(tmp_path, vision_config=fields)
    with pytest.raises(error, match=word):
        load(tmp_path, implementation="vlmserve")


@torch.inference_mode()
def test_quantized_copies_see_as_quantized_at_load(folders: dict[str, Path], tmp_path: Path) -> None:
    config = QuantizationConfig(scheme="int8", vision=True)
    pixels = torch.randn(1, 3, 16, 24)
    for number, folder in enumerate(folders.values()):
        copy = tmp_path / str(number)
        save_quantized(folder, copy, config)
        saved, at_load, plain = (
            load(place, quantization=choice).vision
            for place, choice in ((copy, None), (folder, config), (folder, None))
        )
        assert saved is not None
        assert at_load is not None
        assert plain is not None
        assert torch.equal(saved.encode([pixels])[0], at_load.encode([pixels])[0])
        assert not torch.equal(saved.encode([pixels])[0], plain.encode([pixels])[0])
