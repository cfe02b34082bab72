"""Vision tower, projector and images in prompts against transformers, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlavaForConditionalGeneration

from tests.checkpoints import change_config, make_llava
from tests.paged import PagedRun
from vlmserve.errors import InvalidImageError, ModelLoadError, UnsupportedModelError
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.protocols import LoadedModel
from vlmserve.models.registry import load_model

pytestmark = pytest.mark.usefixtures("kernels")

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "published names": {"published_names": True},
    "sharded": {"shard_size": "60KB"},
    "tied": {"tie_word_embeddings": True},
    "class token kept": {"vision_feature_select_strategy": "full"},
    "last layer": {"vision_feature_layer": -1},
    "first layer": {"vision_feature_layer": 1},
    "embeddings": {"vision_feature_layer": [0]},
    "embeddings counted from the end": {"vision_feature_layer": -5},
    "several layers": {"vision_feature_layer": [-2, 1, 4]},
    "several layers, class token kept": {
        "vision_feature_layer": [3, -4],
        "vision_feature_select_strategy": "full",
    },
    "projector without bias": {"multimodal_projector_bias": False, "projector_hidden_act": "quick_gelu"},
    "another tower": {"vision": {"image_size": 28, "patch_size": 7, "hidden_act": "gelu", "num_channels": 1}},
    "left-over pixels": {"vision": {"image_size": 30, "patch_size": 7}},
}


def load(folder: Path, **options: Any) -> LoadedModel:
    return load_model(folder, LoadSettings(**{"device": torch.device("cpu"), "dtype": torch.float32, **options}))


def reference(folder: Path) -> LlavaForConditionalGeneration:
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(model, LlavaForConditionalGeneration)
    return model.eval()


def images(model: LlavaForConditionalGeneration, count: int) -> torch.Tensor:
    vision = model.config.vision_config
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, vision.num_channels, vision.image_size, vision.image_size, generator=generator)


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
@torch.inference_mode()
def test_pictures_and_logits_equal_transformers(tmp_path: Path, overrides: dict[str, Any]) -> None:
    folder = make_llava(tmp_path, **overrides)
    ours, theirs = load(folder), reference(folder)
    assert ours.vision is not None
    pixels = images(theirs, 2)
    expected = theirs.model.get_image_features(pixels).pooler_output
    embeddings = ours.vision.encode([pixels[:1], pixels[1:]])
    assert expected[0].abs().max() > 0.1
    for actual, features in zip(embeddings, expected, strict=True):
        torch.testing.assert_close(actual, features, atol=1e-4, rtol=0)
    assert_prompts_equal(ours, theirs, [[3, 2, 4, 1, 5]])


@torch.inference_mode()
def assert_prompts_equal(
    ours: LoadedModel, theirs: LlavaForConditionalGeneration, layouts: list[list[int]], step: int = 100
) -> None:
    """Compare logits of prompts; a layout is the number of text tokens before each image and after the last."""
    assert ours.vision is not None
    assert ours.image_token_id is not None
    generator = torch.Generator().manual_seed(3)
    available = images(theirs, max(len(layout) for layout in layouts))
    sequences, expected = [], []
    for layout in layouts:
        embeddings = ours.vision.encode(list(available[: len(layout) - 1, None]))
        parts = [torch.randint(3, ours.image_token_id, (count,), generator=generator) for count in layout]
        ids = parts[0]
        for image, text in zip(embeddings, parts[1:], strict=True):
            ids = torch.cat([ids, torch.full((len(image),), ours.image_token_id), text])
        embedded = ours.language_model.embed(ids)
        if embeddings:
            embedded[ids == ours.image_token_id] = torch.cat(embeddings)
        sequences.append(embedded)
        pixels = {"pixel_values": available[: len(layout) - 1]} if embeddings else {}
        expected.append(theirs(input_ids=ids[None], **pixels).logits[0])
    actual = PagedRun(ours.language_model, sequences).finish([step] * len(sequences))
    for a, b in zip(actual, expected, strict=True):
        assert b.abs().max() > 1
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


@pytest.mark.parametrize("step", [100, 7, 1], ids=["whole prompts", "chunks of 7", "token by token"])
def test_pictures_anywhere_in_a_batch_equal_transformers(tmp_path: Path, step: int) -> None:
    folder = make_llava(tmp_path)
    layouts = [[0, 5], [4, 0], [3, 3], [9], [1], [2, 0, 1, 4], [0, 0, 1], [0, 0, 0, 1]]
    assert_prompts_equal(load(folder), reference(folder), layouts, step)


def test_both_layouts_load_the_same_weights(tmp_path: Path) -> None:
    models = [load(make_llava(tmp_path / str(named), published_names=named)) for named in (False, True)]
    pixels = [torch.ones(1, 3, 42, 42)]
    first, second = (model.vision.encode(pixels)[0] for model in models if model.vision is not None)
    assert torch.equal(first, second)


def test_layers_above_the_chosen_one_are_not_loaded(tmp_path: Path) -> None:
    whole = load(make_llava(tmp_path / "whole", vision_feature_layer=-1))
    part = load(make_llava(tmp_path / "part", vision_feature_layer=1))
    layer = 4 * 32 * 32 + 4 * 32 + 2 * 32 * 56 + 56 + 32 + 4 * 32
    assert whole.num_parameters - part.num_parameters == 3 * layer


def test_tiles_give_their_tokens_in_order(tmp_path: Path) -> None:
    vision = load(make_llava(tmp_path)).vision
    assert vision is not None
    tiles = torch.randn(3, 3, 42, 42)
    together, alone = vision.encode([tiles, tiles[1:2]])
    assert (together.shape, alone.shape) == ((27, 48), (9, 48))
    torch.testing.assert_close(together[9:18], alone, atol=1e-5, rtol=0)
    assert vision.encode([]) == []


def test_a_picture_of_another_size_is_refused(tmp_path: Path) -> None:
    vision = load(make_llava(tmp_path)).vision
    assert vision is not None
    vision.check((1, 3, 42, 42), 9)
    with pytest.raises(InvalidImageError, match="42"):
        vision.check((1, 3, 28, 28), 9)
    with pytest.raises(InvalidImageError, match="9 embeddings"):
        vision.check((1, 3, 42, 42), 10)


@pytest.mark.parametrize("layer", [5, -6, [1, 7], []], ids=str)
def test_a_missing_feature_layer_is_rejected(tmp_path: Path, layer: Any) -> None:
    folder = make_llava(tmp_path)
    change_config(folder, vision_feature_layer=layer)
    with pytest.raises(ModelLoadError, match="vision_feature_layer"):
        load(folder)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"vision_feature_select_strategy": "mean"}, "mean"),
        ({"projector_hidden_act": "mish"}, "mish"),
        ({"vision_config": {"model_type": "siglip_vision_model"}}, "siglip_vision_model"),
        ({"text_config": {"model_type": "gpt2"}}, "gpt2"),
    ],
)
def test_unimplemented_options_are_rejected_by_name(tmp_path: Path, fields: dict[str, Any], word: str) -> None:
    folder = make_llava(tmp_path)
    change_config(folder, **fields)
    with pytest.raises(UnsupportedModelError, match=word):
        load(folder, implementation="vlmserve")
