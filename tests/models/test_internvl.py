"""InternVL's tower and projector against transformers, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import InternVLForConditionalGeneration, Qwen3MoeConfig

from tests.checkpoints import change_config, change_tensors, make_internvl
from tests.models.test_decoder import assert_equal, paged_run, token_sequences
from tests.models.test_families import QWEN3_MOE
from tests.models.test_llava import load
from vlmserve.errors import InvalidImageError, ModelLoadError, UnsupportedModelError
from vlmserve.models.quantized import save_quantized
from vlmserve.settings.quantization import QuantizationConfig

pytestmark = pytest.mark.usefixtures("kernels")

VARIANTS: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({}, 16),
    "published names": ({"published_names": True}, 16),
    "queries and keys without biases": ({"vision": {"attention_bias": False}}, 16),
    "the large tower": ({"vision": {"attention_bias": False, "use_qk_norm": True, "norm_type": "rms_norm"}}, 16),
    "sixteen patches to one": ({"vision": {"image_size": [32, 32]}, "downsample_ratio": 0.25}, 32),
    "plain edges": ({"vision": {"image_size": 28, "patch_size": 7, "hidden_act": "quick_gelu"}}, 28),
    "a mask token": ({"vision": {"use_mask_token": True}, "projector_hidden_act": "relu"}, 16),
}


@pytest.mark.parametrize(("overrides", "tile"), VARIANTS.values(), ids=VARIANTS)
@torch.inference_mode()
def test_embeddings_of_tiles_equal_those_of_transformers(tmp_path: Path, overrides: dict[str, Any], tile: int) -> None:
    folder = make_internvl(tmp_path, **overrides)
    theirs = InternVLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    vision = load(folder).vision
    assert vision is not None
    generator = torch.Generator().manual_seed(1)
    # The last image has more tiles than go through the tower together.
    images = [torch.randn(count, 3, tile, tile, generator=generator) for count in (1, 5, 19)]
    for pixels, ours in zip(images, vision.encode(images), strict=True):
        features = theirs.model.get_image_features(pixels).pooler_output.flatten(0, 1)
        assert features.abs().max() > 0.1
        assert features.std(0).mean() > 0.02, "places differ"
        torch.testing.assert_close(ours, features, atol=1e-4, rtol=1e-4)
        vision.check(tuple(pixels.shape), len(features))
    assert vision.encode([]) == []


@torch.inference_mode()
def test_logits_with_experts_equal_transformers(tmp_path: Path) -> None:
    text = {**QWEN3_MOE, "norm_topk_prob": True}
    folder = make_internvl(tmp_path, text_class=Qwen3MoeConfig, text=text)
    theirs = InternVLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    [sequence] = token_sequences(100, [23])
    assert_equal(paged_run(load(folder), [sequence]).finish([9]), [theirs(input_ids=sequence[None]).logits[0]])


@pytest.mark.parametrize("name", ["lambda_1", "lambda_2", "cls_token", "position_embeddings"])
@torch.inference_mode()
def test_no_parameter_is_left_out(tmp_path: Path, name: str) -> None:
    make_internvl(tmp_path)
    pixels = [torch.ones(1, 3, 16, 16)]
    [before] = load(tmp_path).vision.encode(pixels)  # type: ignore[union-attr]
    change_tensors(tmp_path, lambda own, tensor: (own, tensor * 2 if own.endswith(name) else tensor))
    [after] = load(tmp_path).vision.encode(pixels)  # type: ignore[union-attr]
    assert (before - after).abs().max() > 1e-3


@pytest.mark.parametrize("shape", [(1, 3, 16, 24), (1, 4, 16, 16), (3, 16, 16), (1, 3, 24, 24)], ids=str)
def test_pixels_that_are_no_tiles_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    vision = load(make_internvl(tmp_path)).vision
    assert vision is not None
    with pytest.raises(InvalidImageError, match=r"takes images of \(3, 16, 16\)"):
        vision.check(shape, 4)
    with pytest.raises(InvalidImageError, match="8 embeddings and has 4"):
        vision.check((2, 3, 16, 16), 4)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"vision_feature_layer": -2}, "vision_feature_layer"),
        ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy"),
        ({"vision_config": {"use_mean_pooling": False}}, "use_mean_pooling"),
        ({"vision_config": {"use_absolute_position_embeddings": False}}, "use_absolute_position_embeddings"),
        ({"vision_config": {"norm_type": "batch_norm"}}, "batch_norm"),
        ({"vision_config": {"image_size": [448, 224]}}, "not square"),
        ({"vision_config": {"model_type": "clip_vision_model"}}, "clip_vision_model"),
        ({"text_config": {"model_type": "gpt2"}}, "gpt2"),
    ],
    ids=str,
)
def test_unimplemented_parts_are_rejected_by_name(tmp_path: Path, fields: dict[str, Any], word: str) -> None:
    folder = make_internvl(tmp_path)
    change_config(folder, **fields)
    with pytest.raises(UnsupportedModelError, match=word):
        load(folder, implementation="vlmserve")


def test_patches_that_cannot_be_merged_are_refused(tmp_path: Path) -> None:
    folder = make_internvl(tmp_path)
    change_config(folder, downsample_ratio=0.125)
    with pytest.raises(ModelLoadError, match="4 x 4 patches cannot be merged"):
        load(folder)


@torch.inference_mode()
def test_quantized_copies_see_as_quantized_at_load(tmp_path: Path) -> None:
    folder = make_internvl(
        tmp_path / "plain", text={"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}
    )
    config = QuantizationConfig(scheme="int8", vision=True)
    save_quantized(folder, tmp_path / "saved", config)
    pixels = torch.randn(3, 3, 16, 16)
    saved, at_load, plain = (
        load(place, quantization=choice).vision
        for place, choice in ((tmp_path / "saved", None), (folder, config), (folder, None))
    )
    assert saved is not None
    assert at_load is not None
    assert plain is not None
    assert torch.equal(saved.encode([pixels])[0], at_load.encode([pixels])[0])
    assert not torch.equal(saved.encode([pixels])[0], plain.encode([pixels])[0])
