"""Muse Glimmer's tower and decoder against transformers, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, MuseGlimmerConfig, MuseGlimmerForConditionalGeneration

from tests.checkpoints import change_config
from tests.models.test_decoder import assert_equal, paged_run, token_sequences
from tests.models.test_llava import load
from tests.muse_glimmer import make_muse_glimmer, rows_of
from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.models.registry import Description
from vlmserve.models.weights import Checkpoint, merge_as_stored, weight_slots

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.mark.parametrize(
    "vision",
    [{}, {"merge_size": 1, "pos_emb_height": 3, "pos_emb_width": 3, "hidden_act": "gelu_pytorch_tanh"}],
    ids=["usual", "not merged"],
)
@torch.inference_mode()
def test_embeddings_equal_those_of_transformers(tmp_path: Path, vision: dict[str, Any]) -> None:
    folder = make_muse_glimmer(tmp_path, vision=vision)
    theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    tower = load(folder).vision
    assert tower is not None
    side = 4 * theirs.config.vision_config.merge_size
    generator = torch.Generator().manual_seed(1)
    grids = ((1, 2), (5, 2), (3, 8), (1, 1))
    images = [torch.randn(1, 3, down * side, across * side, generator=generator) for down, across in grids]
    for pixels, ours in zip(images, tower.encode(images), strict=True):
        rows, grid = rows_of(pixels)
        [features] = theirs.model.get_image_features(rows, image_grid_thw=grid).pooler_output
        torch.testing.assert_close(ours, features, atol=1e-4, rtol=1e-4)
        tower.check(tuple(pixels.shape), len(features))
    [many] = tower.encode(images[2:3])
    assert many.std(0).mean() > 0.02, "places differ"


@pytest.mark.parametrize(
    "text",
    [{}, {"layer_rope_theta": [0, 1e4, 0, 1e4, 1e4], "post_norm_eps": 0.1, "tie_word_embeddings": True}],
    ids=["usual", "other positions"],
)
@torch.inference_mode()
def test_logits_equal_those_of_transformers(tmp_path: Path, text: dict[str, Any]) -> None:
    folder = make_muse_glimmer(tmp_path, text=text)
    theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    sequences = token_sequences(300, [40, 1, 23])
    expected = [theirs(input_ids=sequence[None]).logits[0] for sequence in sequences]
    run = paged_run(load(folder), sequences)
    run.step([33, 0, 5])
    assert_equal(run.finish([9, 9, 9]), expected)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("attention_bias", True, UnsupportedModelError),
        ("layer_norm_eps", 1e-3, UnsupportedModelError),
        ("pos_emb_width", 6, UnsupportedModelError),
        ("merge_size", 3, ModelLoadError),
    ],
)
def test_unimplemented_fields_are_rejected(tmp_path: Path, field: str, value: Any, error: type[Exception]) -> None:
    folder = make_muse_glimmer(tmp_path)
    section = "text_config" if field == "attention_bias" else "vision_config"
    change_config(folder, **{section: {field: value}})
    with pytest.raises(error, match=field):
        load(folder, implementation="vlmserve")


def test_transformers_names_of_30b_fill_every_slot(tmp_path: Path) -> None:
    """The sizes of transformers' defaults, which are those of the published checkpoint."""
    folder = make_muse_glimmer(tmp_path)
    config = MuseGlimmerConfig(text_config={}, vision_config={})
    with torch.device("meta"):
        theirs = MuseGlimmerForConditionalGeneration(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
    config.architectures = ["MuseGlimmerForConditionalGeneration"]
    config.save_pretrained(folder)
    description = Description.read(folder)
    named = {description.rename(name): shape for name, shape in shapes.items()}
    spec = description.spec(Checkpoint(folder, description.rename))
    parts = description.build(spec, TorchReference(), dtype=torch.bfloat16, device=torch.device("meta"))
    merge_as_stored(parts.modules, named.keys())
    assert {name: tuple(slot.shape) for name, slot in weight_slots(parts.modules)} == named
    assert sum(window is None for window in (layer.window for layer in spec.attention)) == 13
