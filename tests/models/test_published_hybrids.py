"""Hybrid models of published sizes: all tensors of transformers' classes are found under the names that it saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from tests.published import write_tensors
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.models.registry import Description
from vlmserve.models.weights import Checkpoint, merge_as_stored, weight_slots

META = torch.device("meta")
QWEN_TEXT = {"num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3.5-4B": (
        "Qwen3_5",
        {
            "text_config": {**QWEN_TEXT, "hidden_size": 2560, "intermediate_size": 9216, "tie_word_embeddings": True},
            "vision_config": {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2560},
            "tie_word_embeddings": True,
        },
    ),
    "MiniCPM-V 4.6": (
        "MiniCPMV4_6",
        {
            "text_config": {
                "model_type": "qwen3_5_text", "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24,
                "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_value_heads": 16,
            },
            "vision_config": {
                "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
                "image_size": 980, "patch_size": 14,
            },
            "image_token_id": 248056,
        },
    ),
}  # fmt: skip
MTP = {"mtp.fc.weight": (2560, 5120), "mtp.layers.0.input_layernorm.weight": (2560,), "mtp.norm.weight": (2560,)}
"""Tensors of the layer for multi-token prediction, which transformers does not read."""


@pytest.mark.parametrize("name", MODELS)
def test_saved_tensors_match_the_models_slots(tmp_path: Path, name: str) -> None:
    prefix, fields = MODELS[name]
    config = getattr(transformers, f"{prefix}Config")(**fields)
    with META:
        model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config)
    saved = revert_weight_conversion(model, model.state_dict())
    shapes = {key: tuple(tensor.shape) for key, tensor in saved.items() if not _is_tied(key, config)}
    unused = MTP if name.startswith("Qwen") else {}
    write_tensors(tmp_path / "model.safetensors", {**shapes, **unused})
    architecture = {"architectures": [type(model).__name__]}
    (tmp_path / "config.json").write_text(json.dumps({**config.to_dict(), **architecture}))
    description = Description.read(tmp_path)
    checkpoint = Checkpoint(tmp_path, description.rename)
    spec = description.spec(checkpoint)
    parts = description.build(spec, TorchReference(), dtype=torch.bfloat16, device=META)
    merge_as_stored(parts.modules, checkpoint.names)
    expected = {checkpoint.canonical(key): shape for key, shape in shapes.items()}
    assert {slot: tuple(found.shape) for slot, found in weight_slots(parts.modules)} == expected


def _is_tied(name: str, config: Any) -> bool:
    return name == "lm_head.weight" and config.tie_word_embeddings
