"""What a folder's configuration makes of it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import change_config, make_llama, make_llava
from vlmserve.errors import ModelLoadError, UnsupportedModelError
from vlmserve.kernels.choice import multiplies_bfloat16
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.protocols import LoadedModel
from vlmserve.models.registry import Description, load_model
from vlmserve.models.weights import Checkpoint

CPU = torch.device("cpu")


def load(folder: Path, dtype: torch.dtype | None = None) -> LoadedModel:
    return load_model(folder, LoadSettings(device=CPU, dtype=dtype))


def test_a_llava_says_what_it_is(tmp_path: Path) -> None:
    folder = make_llava(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    model = load(folder)
    assert model.architecture == "LlavaForConditionalGeneration"
    assert model.image_token_id == config["image_token_index"]
    assert model.max_position == 512
    assert model.end_token_ids == {2}
    assert (model.dtype, model.device.torch_device) == (torch.float32, CPU)
    assert model.language_model.vocab_size == config["text_config"]["vocab_size"]
    assert model.language_model.hidden_size == 48


def test_a_llama_sees_nothing(tmp_path: Path) -> None:
    model = load(make_llama(tmp_path))
    assert (model.architecture, model.vision, model.image_token_id) == ("LlamaForCausalLM", None, None)


def test_the_placeholder_has_two_spellings(tmp_path: Path) -> None:
    folder = make_llava(tmp_path)
    change_config(folder, image_token_index=None, image_token_id=7)
    assert load(folder).image_token_id == 7


def test_a_missing_architecture_follows_from_model_type(tmp_path: Path) -> None:
    folder = make_llama(tmp_path)
    change_config(folder, architectures=None)
    assert load(folder).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 9}, {5, 6}),
        ({"eos_token_id": 0}, {"eos_token_id": 9}, {0}),
        ({}, {"eos_token_id": [9, 10]}, {9, 10}),
        (None, {"eos_token_id": 9}, {9}),
        (None, {"eos_token_id": None}, {2}),
    ],
)
def test_end_tokens_come_from_the_first_file(
    tmp_path: Path, generation: dict[str, Any] | None, config: dict[str, Any], expected: set[int]
) -> None:
    folder = make_llama(tmp_path)
    change_config(folder, **config)
    path = folder / "generation_config.json"
    path.unlink()
    if generation is not None:
        path.write_text(json.dumps(generation))
    assert load(folder).end_token_ids == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{ not json", "not valid JSON"),
        ("\xff\xfe", "not"),
        ("[1, 2]", "does not hold a JSON object"),
        ("{}", "model_type"),
        ('{"architectures": ["LlamaForCausalLM"], "hidden_size": "wide"}', "hidden_size is .wide.; it must be"),
        (
            '{"architectures": ["LlamaForCausalLM"], "num_attention_heads": 0}',
            "num_attention_heads is 0; allowed are 1 to",
        ),
        ('{"architectures": ["LlavaForConditionalGeneration"], "text_config": "llama"}', "text_config"),
    ],
)
def test_a_broken_configuration_is_told(tmp_path: Path, content: str | None, message: str) -> None:
    folder = make_llama(tmp_path)
    path = folder / "config.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelLoadError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel'.*LlamaForCausalLM, LlavaForConditional"),
        ({"architectures": ["MistrallForCausalLM"]}, "not supported, MistralForCausalLM and .* would be"),
        ({"architectures": None, "model_type": "bert"}, "'bert'"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantized"),
        ({"hidden_act": "mish"}, "mish"),
        ({"rope_parameters": {"rope_type": "made up", "factor": 4.0}}, "made up"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    folder = make_llama(tmp_path)
    change_config(folder, **fields)
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(folder, LoadSettings(device=CPU, implementation="vlmserve"))


def test_a_changed_type_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="vlmserve.devices.cpu"):
        load(make_llama(tmp_path, dtype=torch.float16))
    assert "float16" in caplog.text


@pytest.mark.parametrize("spelling", ["dtype", "torch_dtype", None])
def test_the_stored_type_is_found(tmp_path: Path, spelling: str | None) -> None:
    folder = make_llama(tmp_path)
    change_config(folder, dtype=None)
    if spelling is not None:
        change_config(folder, **{spelling: "bfloat16"})
    stored = torch.bfloat16 if spelling else torch.float32
    assert Description.read(folder).dtype(Checkpoint(folder)) == stored
    assert load(folder).dtype in (stored, torch.bfloat16 if multiplies_bfloat16() else torch.float32)
