"""Rotary positions against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.layer_specs import FACTORS_OF_PAIRS, SCALINGS, RopeSpec
from vlmserve.layers.rope import Rope, RopeTables, apply_rope, frequencies

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "scaling",
    [{}, {"type": "linear", "factor": 3.0}, {"rope_type": "linear", "factor": 2.5}, LLAMA3, {**LLAMA3, "factor": 32.0}],
    ids=["default", "linear", "linear in today's spelling", "llama3", "llama3 by 32"],
)
def test_queries_and_keys_turn_as_in_transformers(scaling: dict[str, Any]) -> None:
    config = LlamaConfig(hidden_size=128, num_attention_heads=4, rope_theta=5e4, rope_scaling=dict(scaling) or None)
    positions = torch.tensor([0, 1, 7, 63, 64, 500, 8191])
    query = torch.randn(7, 4, 32)
    cos, sin = LlamaRotaryEmbedding(config)(query, positions[None])
    expected, _ = apply_rotary_pos_emb(query.transpose(0, 1)[None], query.transpose(0, 1)[None], cos, sin)

    rope = Rope.of(RopeSpec.from_config(32, 5e4, scaling, 2048), torch.device("cpu"))
    rotated = apply_rope(query, RopeTables(rope, positions, 8192, torch.float32))
    torch.testing.assert_close(rotated, expected[0].transpose(0, 1), atol=2e-5, rtol=0)


def test_tables_grow_and_stay_what_they_were() -> None:
    rope = Rope(torch.rand(4))
    first = rope.upto(10)
    assert rope.upto(len(first[0])) is first
    for before, after in zip(first, rope.upto(len(first[0]) + 1), strict=True):
        assert len(after) == 2 * len(before)
        assert torch.equal(after[: len(before)], before)
    assert len(rope.upto(100_000)[0]) == 100_000


def test_parameters_of_transformers_5_carry_the_base() -> None:
    assert RopeSpec.from_config(8, 1e4, {"rope_type": "default", "rope_theta": 7e5}, 2048).theta == 7e5


def test_llama3_scaling_defaults_to_the_config_context() -> None:
    scaling = {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}
    assert RopeSpec.from_config(8, 1e4, scaling, 4096).original_context == 4096


@pytest.mark.parametrize("scaling", [{"rope_type": "axial", "factor": 2.0}, {"type": "made up"}])
def test_other_scalings_are_refused_by_name(scaling: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=str(scaling.get("rope_type", scaling.get("type")))):
        RopeSpec.from_config(8, 1e4, scaling, 2048)


def test_an_incomplete_scaling_says_what_it_lacks() -> None:
    with pytest.raises(ModelLoadError, match="low_freq_factor"):
        RopeSpec.from_config(8, 1e4, {"rope_type": "llama3", "factor": 2.0}, 2048)


def test_factors_must_be_as_many_as_pairs() -> None:
    with pytest.raises(ModelLoadError, match="3 RoPE factors for 4 pairs"):
        RopeSpec.from_config(8, 1e4, {"rope_type": "factors", "factors": [1.0, 2.0, 3.0]}, 2048)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_every_scaling_has_frequencies_and_required_parameters(scaling: str) -> None:
    parameters = {name: [2.0] * 4 if name in FACTORS_OF_PAIRS else 2.0 for name in SCALINGS[scaling]}
    if scaling == "llama3":
        parameters["high_freq_factor"] = 4.0
    spec = RopeSpec.from_config(8, 1e4, {"rope_type": scaling, **parameters}, 2048)
    for long in (False, True):
        assert frequencies(spec, torch.device("cpu"), long=long).isfinite().all()
    for name in SCALINGS[scaling]:
        others = {key: value for key, value in parameters.items() if key != name}
        with pytest.raises(ModelLoadError, match=name):
            RopeSpec.from_config(8, 1e4, {"rope_type": scaling, **others}, 2048)
