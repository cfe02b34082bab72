"""Qwen3-VL (https://arxiv.org/abs/2511.21631)."""

from __future__ import annotations

from dataclasses import replace

from vlmserve.errors import ModelLoadError
from vlmserve.families.family import LanguageFamily, Names, VisionFamily, vision_section
from vlmserve.families.qwen2_vl import QWEN_TOKENS, QWEN_TOWER
from vlmserve.families.qwen3 import QWEN3, qwen3
from vlmserve.families.spec import ArchSpec, Config, with_sections


def deepstack_layers(vision_config: Config) -> tuple[int, ...]:
    """Tower layers whose outputs are merged too, each for one of the decoder's first layers
    (https://arxiv.org/abs/2406.04334)."""
    return tuple(vision_config.get("deepstack_visual_indexes", (8, 16, 24)))


def _qwen3_vl(config: Config) -> ArchSpec:
    spec = qwen3(with_sections(config, [24, 20, 20], mrope_interleaved=True))
    if config["deepstack"] > len(spec.attention):
        raise ModelLoadError(
            f"config.json: images have features for {config['deepstack']} layers (deepstack_visual_indexes), and the "
            f"decoder has {len(spec.attention)}"
        )
    return replace(spec, deepstack=config["deepstack"])


_NAMES: Names = (
    (r"(visual\.blocks\.\d+\.mlp)\.linear_fc", r"\1.fc"),
    (r"(visual\.(?:merger|deepstack_merger_list\.\d+))\.norm\.", r"\1.ln_q."),
    (r"(visual\.(?:merger|deepstack_merger_list\.\d+))\.linear_fc1\.", r"\1.mlp.0."),
    (r"(visual\.(?:merger|deepstack_merger_list\.\d+))\.linear_fc2\.", r"\1.mlp.2."),
)

FAMILIES = (
    LanguageFamily(
        model_type="qwen3_vl_text",
        defaults={**QWEN3, "max_position_embeddings": 128000, "rope_theta": 5e5, "deepstack": 0},
        build=_qwen3_vl,
    ),
    VisionFamily(
        model_type="qwen3_vl",
        architecture="Qwen3VLForConditionalGeneration",
        text_type="qwen3_vl_text",
        text_fields=lambda config: {"deepstack": len(deepstack_layers(vision_section(config)))},
        names=_NAMES,
        **QWEN_TOWER,
        **QWEN_TOKENS,
        frame_ends={"vision_start_token_id": 151652, "vision_end_token_id": 151653},
        models="Qwen3-VL 2B to 32B",
    ),
)
