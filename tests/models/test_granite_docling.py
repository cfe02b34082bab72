"""Granite Docling's tower, connector and decoder against transformers, in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    GraniteDoclingConfig,
    GraniteDoclingForConditionalGeneration,
)

from tests.checkpoints import change_config
from tests.granite_docling import make_granite_docling
from tests.models.test_decoder import assert_equal, paged_run, token_sequences
from tests.models.test_llava import load
from vlmserve.errors import ModelLoadError
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.models.registry import Description
from vlmserve.models.weights import Checkpoint, merge_as_stored, weight_slots

pytestmark = pytest.mark.usefixtures("kernels")


@torch.inference_mode()
def test_embeddings_equal_those_of_transformers(tmp_path: Path) -> None:
    folder = make_granite_docling(tmp_path)
    theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    tower = load(folder).vision
    assert tower is not None
    images = [torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(count)) for count in (1, 5)]
    text = theirs.config.text_config
    for pixels, ours in zip(images, tower.encode(images), strict=True):
        found = theirs.model.get_image_features(pixels[None], torch.ones(1, len(pixels), dtype=torch.bool))
        # Our residual stream is divided by the residual multiplier.
        parts = [found.pooler_output[0] * text.embedding_multiplier, *(own[0] for own in found.deepstack_features)]
        expected = torch.cat(parts, -1) / text.residual_multiplier
        assert expected.std(0).mean() > 0.02, "places differ"
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
        tower.check(tuple(pixels.shape), len(expected))


@pytest.mark.parametrize("text", [{}, {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 0.01}], ids=str)
@torch.inference_mode()
def test_logits_equal_those_of_transformers(tmp_path: Path, text: dict[str, Any]) -> None:
    folder = make_granite_docling(tmp_path, text=text)
    theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    sequences = token_sequences(300, [40, 1, 23])
    expected = [theirs(input_ids=sequence[None]).logits[0] for sequence in sequences]
    assert_equal(paged_run(load(folder), sequences).finish([9, 9, 9]), expected)


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("deepstack_visual_indexes", [1, 7], "deepstack_visual_indexes"),
        ("scale_factor", 3, "scale_factor"),
        ("deepstack_visual_indexes", [0, 1, 2, 3], "features for 4 layers"),
    ],
)
def test_impossible_towers_are_rejected(tmp_path: Path, field: str, value: Any, word: str) -> None:
    folder = make_granite_docling(tmp_path)
    own = json.loads((folder / "config.json").read_text())["vision_config"]
    change_config(folder, vision_config={**own, field: value})
    with pytest.raises(ModelLoadError, match=word):
        load(folder, implementation="vlmserve")


def test_transformers_names_of_500m_fill_every_slot(tmp_path: Path) -> None:
    """The fine path and the density router stay unused."""
    folder = make_granite_docling(tmp_path)
    config = GraniteDoclingConfig(text_config={}, vision_config={})
    with torch.device("meta"):
        theirs = GraniteDoclingForConditionalGeneration(config)
    shapes = {name: tuple(one.shape) for name, one in theirs.state_dict().items() if name != "lm_head.weight"}
    config.architectures = ["GraniteDoclingForConditionalGeneration"]
    config.save_pretrained(folder)
    description = Description.read(folder)
    named = {description.rename(name): shape for name, shape in shapes.items() if ".fine." not in name}
    spec = description.spec(Checkpoint(folder, description.rename))
    parts = description.build(spec, TorchReference(), dtype=torch.bfloat16, device=torch.device("meta"))
    merge_as_stored(parts.modules, named.keys())
    assert {name: tuple(slot.shape) for name, slot in weight_slots(parts.modules)} == named
    assert (spec.deepstack, len(spec.mixers)) == (3, 28)
