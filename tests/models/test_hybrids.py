"""Models with layers that have states: long prompts in odd chunks, images, weights of few bits, ranks, tensor names."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Lfm3Config,
    Lfm3ForCausalLM,
    Lfm3VlConfig,
    Lfm3VlForConditionalGeneration,
    MiniCPMV4_6Config,
    MiniCPMV4_6ForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
)

from tests.checkpoints import make_text_model
from tests.engine.test_qwen_vl import make_oracle
from tests.models.test_decoder import assert_equal, load, paged_run, token_sequences, transformers_logits
from tests.models.test_families import HYBRIDS, LFM3, QWEN35, make
from tests.models.test_qwen_vision import patches
from tests.ranks import Meeting, ThreadRanks
from tests.static_ranges import use_ranges
from vlmserve.calibration.forward import hidden_states, make_groups
from vlmserve.families.spec import ArchSpec
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.registry import META, Description, load_model
from vlmserve.models.weights import canonical_name, weight_slots
from vlmserve.quant.methods.rtn import round_to_nearest
from vlmserve.settings.quantization import QuantizationConfig, Scheme
from vlmserve.types import Prompt

CPU = torch.device("cpu")
WIDE = {
    **QWEN35, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
}  # fmt: skip
"""Groups of 32 weights divide all rows."""
ROUNDED: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3.5": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, WIDE),
    "lfm3": (
        Lfm3ForCausalLM,
        Lfm3Config,
        {**LFM3, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "tie_word_embeddings": False},
    ),
}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", HYBRIDS)
def test_long_prompts_in_odd_chunks_equal_transformers(tmp_path: Path, name: str) -> None:
    folder, sequences = make(tmp_path, name), token_sequences(300, [150, 70])
    expected = transformers_logits(folder, sequences)
    run = paged_run(load(folder), sequences)
    for counts in ([1, 70], [66, 0], [1, 0]):
        run.step(counts)
    assert_equal(run.finish([31, 1]), expected)


@pytest.mark.parametrize("kind", ["qwen3_5", "lfm3_vl"])
@torch.inference_mode()
def test_images_equal_those_of_transformers(tmp_path: Path, kind: str) -> None:
    oracle = make_oracle(tmp_path, kind)
    loaded = load_model(tmp_path, LoadSettings(CPU, torch.float32))
    parts: list[tuple[int | tuple[int, int], ...]] = [
        (5, (2, 3), 9),
        ((4, 1), 3),
        (2, (5, 5), 20),
        ((1, 2), 1, (3, 5), 70),
    ]
    for seed, shapes in enumerate(parts):
        prompt: Prompt = oracle.prompt(seed, *shapes)
        [group] = make_groups(loaded.language_model, [prompt])
        logits = loaded.language_model.logits(hidden_states(loaded, group))
        assert_equal([logits], [oracle.model(**oracle.inputs(prompt)).logits[0]])


@torch.inference_mode()
def test_frames_of_lfm3_equal_transformers(tmp_path: Path) -> None:
    oracle = make_oracle(tmp_path, "lfm3_vl")
    vision = load_model(tmp_path, LoadSettings(CPU, torch.float32)).vision
    assert vision is not None
    generator = torch.Generator().manual_seed(1)
    shapes = ((3, 16, 24), (1, 8, 8), (4, 24, 16), (1, 40, 24))
    videos = [torch.randn(frames, 3, *size, generator=generator) for frames, *size in shapes]
    rows, grids = zip(*(patches(video, oracle.model.config.vision_config) for video in videos), strict=True)
    expected = torch.cat(oracle.model.model.get_video_features(torch.cat(rows), torch.cat(grids)).pooler_output)
    torch.testing.assert_close(torch.cat(vision.encode(videos)), expected, atol=1e-4, rtol=1e-4)
    kernels = use_ranges(vision)
    torch.testing.assert_close(torch.cat(vision.encode(videos)), expected, atol=1e-4, rtol=1e-4)
    assert [kernel.num_attended for kernel in kernels] == [1] * len(kernels)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("family", ROUNDED)
def test_rounded_weights_equal_the_same_weights_in_transformers(tmp_path: Path, family: str, scheme: Scheme) -> None:
    model_class, config_class, fields = ROUNDED[family]
    folder = make_text_model(tmp_path / "plain", model_class, config_class, **fields)
    config = QuantizationConfig(scheme=scheme)
    loaded = load_model(folder, LoadSettings(CPU, torch.float32, kernels="torch", quantization=config))
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "in_proj_a" in name or "in_proj_b" in name:
            continue
        if "proj" in name or "feed_forward" in name or name == "lm_head.weight":
            bits = 8 if scheme == "int8" or name == "lm_head.weight" else 4
            tensors[name] = round_to_nearest(
                tensor,
                bits=bits,
                group_size=config.group_size,
                symmetric=config.symmetric,
                zero_points=config.zero_points,
            ).dequantize()
    rounded = make_text_model(tmp_path / "rounded", model_class, config_class, **fields)
    save_file(tensors, rounded / "model.safetensors", {"format": "pt"})
    sequences = token_sequences(300, [70, 9])
    assert_equal(paged_run(loaded, sequences).finish([9, 9]), transformers_logits(rounded, sequences))


@pytest.mark.parametrize("name", HYBRIDS)
def test_two_ranks_share_heads(tmp_path: Path, name: str) -> None:
    folder, sequences, meeting = make(tmp_path, name), token_sequences(300, [40, 9]), Meeting(2)

    def logits(rank: int) -> list[Tensor]:
        loaded = load_model(folder, LoadSettings(CPU, torch.float32), ranks=ThreadRanks(meeting, rank))
        with torch.inference_mode():
            return paged_run(loaded, sequences).finish([11, 1])

    expected = transformers_logits(folder, sequences)
    with ThreadPoolExecutor(2) as threads:
        for own in threads.map(logits, range(2)):
            assert_equal(own, expected)


def compared(folder: Path, model_class: Any, config: Any) -> tuple[Description, ArchSpec, set[str]]:
    """What a config describes, once its tensors are those of transformers' class; their names."""
    with META:
        theirs = model_class(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items() if name != "lm_head.weight"}
    description = Description.of(folder, json.loads(config.to_json_string(use_diff=False)))
    spec = description.family.build({**description.family.defaults, **description.text_config})
    parts = description.build(spec, TorchReference(), dtype=torch.bfloat16, device=META)
    slots = {name: tuple(slot.shape) for name, slot in weight_slots(parts.modules)}
    assert {description.rename(name): shape for name, shape in shapes.items()} == slots
    return description, spec, set(slots)


def test_default_tensors_of_lfm3_vl_are_known(tmp_path: Path) -> None:
    config = Lfm3VlConfig(tie_word_embeddings=True)
    description, spec, _ = compared(tmp_path, Lfm3VlForConditionalGeneration, config)
    assert len(spec.states) > len(spec.attention)
    assert description.image_token_id == config.image_token_id


def test_tensors_of_qwen35_4b_are_known(tmp_path: Path) -> None:
    """As transformers' classes name them, with the MTP layer that nothing reads."""
    text: dict[str, Any] = {
        "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32, "tie_word_embeddings": True,
        "max_position_embeddings": 262144, "head_dim": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [11, 11, 10],
                            "mrope_interleaved": True, "partial_rotary_factor": 0.25},
    }  # fmt: skip
    vision = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2560}
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True)
    description, spec, slots = compared(tmp_path, Qwen3_5ForConditionalGeneration, config)
    assert description.rename("mtp.layers.0.mlp.up_proj.weight") not in slots
    assert canonical_name("model.language_model.norm.weight", str) in slots
    assert (len(spec.states), len(spec.attention), spec.max_position) == (24, 8, 262144)
    assert {rope.size for rope in spec.ropes if rope is not None} == {64}
    assert description.image_token_id == 248056


def test_tensors_of_minicpmv_46_are_known(tmp_path: Path) -> None:
    text = {
        "model_type": "qwen3_5_text", "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24,
        "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_value_heads": 16, "tie_word_embeddings": True,
    }  # fmt: skip
    vision = {
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
        "image_size": 980, "patch_size": 14,
    }  # fmt: skip
    config = MiniCPMV4_6Config(text_config=text, vision_config=vision, tie_word_embeddings=True, image_token_id=248056)
    _, spec, _ = compared(tmp_path, MiniCPMV4_6ForConditionalGeneration, config)
    assert (len(spec.states), len(spec.attention)) == (18, 6)
