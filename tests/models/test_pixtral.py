"""Pixtral's tower and projectors against transformers, in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, MistralConfig

from tests.checkpoints import change_config, change_tensors, make_lighton_ocr, make_mistral3, make_pixtral
from tests.models.test_llava import load
from tests.static_ranges import use_ranges
from vlmserve.errors import InvalidImageError, ModelLoadError, UnsupportedModelError
from vlmserve.frontend.processors import image_processor
from vlmserve.media.processor import Placeholders
from vlmserve.models.quantized import save_quantized
from vlmserve.models.vision.pixtral import PixtralVision
from vlmserve.prompt.tokenizer import Tokenizer
from vlmserve.settings.config import MediaConfig
from vlmserve.settings.quantization import QuantizationConfig

pytestmark = pytest.mark.usefixtures("kernels")

Make = Callable[[Path], Path]
VARIANTS: dict[str, tuple[Make, int]] = {
    "Pixtral": (make_pixtral, 4),
    "Pixtral, published names": (
        lambda folder: make_pixtral(folder, published_names=True, vision={"hidden_act": "silu"}), 4
    ),
    "Ministral 3": (make_mistral3, 6),
    "LightOnOCR": (make_lighton_ocr, 6),
    "Mistral Small 3, published names, merged by three": (
        lambda folder: make_mistral3(
            folder, text_class=MistralConfig, published_names=True, spatial_merge_size=3,
            multimodal_projector_bias=True,
            projector_hidden_act="relu", vision={"rope_parameters": {"rope_type": "axial", "rope_theta": 500.0}},
        ), 9,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "side"), VARIANTS.values(), ids=VARIANTS)
@torch.inference_mode()
def test_embeddings_equal_those_of_transformers(tmp_path: Path, make: Make, side: int) -> None:
    folder = make(tmp_path)
    theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    vision = load(folder).vision
    assert vision is not None
    generator = torch.Generator().manual_seed(1)
    images = [
        torch.randn(1, 3, down * side, across * side, generator=generator) for down, across in ((1, 2), (5, 2), (3, 8))
    ]
    for pixels, ours in zip(images, vision.encode(images), strict=True):
        [features] = theirs.model.get_image_features(pixels, image_sizes=torch.tensor([pixels.shape[2:]])).pooler_output
        assert features.abs().max() > 0.1
        assert features.std(0).mean() > 0.02, "places differ"
        torch.testing.assert_close(ours, features, atol=1e-4, rtol=1e-4)
        vision.check(tuple(pixels.shape), len(features))
    assert vision.encode([]) == []


@pytest.mark.parametrize(
    "name", ["ln_pre.weight", "multi_modal_projector.norm.weight", "merging_layer.weight", "layers.0.ffn_norm.weight"]
)
@torch.inference_mode()
def test_no_parameter_is_left_out(tmp_path: Path, name: str) -> None:
    make_mistral3(tmp_path)
    pixels = [torch.ones(1, 3, 12, 12)]
    [before] = load(tmp_path).vision.encode(pixels)  # type: ignore[union-attr]
    change_tensors(tmp_path, lambda own, tensor: (own, tensor * 2 if own.endswith(name) else tensor))
    [after] = load(tmp_path).vision.encode(pixels)  # type: ignore[union-attr]
    assert (before - after).abs().max() > 1e-3


def test_lighton_ocr_runs_under_its_other_name(tmp_path: Path) -> None:
    make_lighton_ocr(tmp_path)
    change_config(tmp_path, architectures=["LightOnOCRForConditionalGeneration"], model_type="mistral3")
    assert load(tmp_path).architecture == "LightOnOcrForConditionalGeneration"
    processor = image_processor(tmp_path, Tokenizer.from_folder(tmp_path), MediaConfig())
    assert processor.placeholders(np.zeros((1, 3, 12, 18), np.uint8), (18, 12)) == Placeholders(6)


@pytest.fixture(scope="module")
def mistral3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mistral3(tmp_path_factory.mktemp("mistral3"))


@torch.inference_mode()
def test_pictures_of_several_sizes_are_batched(mistral3: Path) -> None:
    vision = load(mistral3).vision
    assert isinstance(vision, PixtralVision)
    images = [torch.randn(1, 3, *size) for size in ((12, 18), (6, 6), (12, 18), (30, 12))]
    expected = vision.encode(images)
    kernels = use_ranges(vision)
    for embeddings, alone in zip(vision.encode(images), expected, strict=True):
        torch.testing.assert_close(embeddings, alone, atol=1e-5, rtol=1e-5)
    assert [kernel.num_attended for kernel in kernels] == [1] * len(kernels)


@pytest.mark.parametrize("shape", [(1, 3, 12, 16), (1, 4, 12, 12), (3, 12, 12), (2, 3, 12, 12), (1, 3, 0, 6)], ids=str)
def test_pixels_that_are_no_whole_squares_are_refused(mistral3: Path, shape: tuple[int, ...]) -> None:
    vision = load(mistral3).vision
    assert vision is not None
    with pytest.raises(InvalidImageError, match="whole squares of 6 pixels"):
        vision.check(shape, 4)
    with pytest.raises(InvalidImageError, match="6 embeddings and has 4"):
        vision.check((1, 3, 12, 18), 4)


@pytest.mark.parametrize(
    ("make", "fields", "word"),
    [
        (make_mistral3, {"vision_feature_layer": -2}, "vision_feature_layer"),
        (make_mistral3, {"vision_config": {"model_type": "siglip_vision_model"}}, "siglip_vision_model"),
        (make_mistral3, {"text_config": {"model_type": "gpt2"}}, "gpt2"),
        (make_pixtral, {"vision_feature_layer": [-2, -1]}, "vision_feature_layer"),
        (make_pixtral, {"vision_feature_select_strategy": "default"}, "vision_feature_select_strategy"),
    ],
)
def test_unimplemented_parts_are_rejected_by_name(
    tmp_path: Path, make: Make, fields: dict[str, Any], word: str
) -> None:
    folder = make(tmp_path)
    change_config(folder, **fields)
    with pytest.raises(UnsupportedModelError, match=word):
        load(folder, implementation="vlmserve")


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"spatial_merge_size": 0}, "spatial_merge_size is 0"),
        ({"vision_config": {"hidden_size": 24, "num_attention_heads": 4}}, "of 4"),
    ],
)
def test_impossible_sizes_are_refused(tmp_path: Path, fields: dict[str, Any], word: str) -> None:
    folder = make_mistral3(tmp_path)
    change_config(folder, **fields)
    with pytest.raises(ModelLoadError, match=word):
        load(folder)


@torch.inference_mode()
def test_quantized_copies_see_as_quantized_at_load(mistral3: Path, tmp_path: Path) -> None:
    config = QuantizationConfig(scheme="int8", vision=True)
    save_quantized(mistral3, tmp_path / "saved", config)
    pixels = torch.randn(1, 3, 12, 18)
    saved, at_load, plain = (
        load(place, quantization=choice).vision
        for place, choice in ((tmp_path / "saved", None), (mistral3, config), (mistral3, None))
    )
    assert saved is not None
    assert at_load is not None
    assert plain is not None
    assert torch.equal(saved.encode([pixels])[0], at_load.encode([pixels])[0])
    assert not torch.equal(saved.encode([pixels])[0], plain.encode([pixels])[0])
