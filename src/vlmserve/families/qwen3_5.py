"""Qwen3.5, 3.6 and 3.8: gated delta rule in most layers, attention in the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vlmserve.errors import ModelLoadError
from vlmserve.families.family import LanguageFamily, NamedModel, VisionFamily
from vlmserve.families.gguf import Clip, GGUFText, Metadata
from vlmserve.families.gguf import with_sections as gguf_sections
from vlmserve.families.llama import LLAMA
from vlmserve.families.qwen2_vl import QWEN_TOWER
from vlmserve.families.qwen3 import QWEN3_MOE_NAMES, gguf_experts, qwen3_experts
from vlmserve.families.qwen3_vl import QWEN3_GGUF_TOWER, QWEN3_VISION_NAMES
from vlmserve.families.spec import ArchSpec, Config, HeadNormSpec, NormSpec, usual_spec, with_sections
from vlmserve.layer_specs import DeltaSpec

_TEXT: Config = {
    **LLAMA,
    "vocab_size": 248320,
    "intermediate_size": 12288,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "eos_token_id": None,
}


def _qwen35(config: Config) -> ArchSpec:
    norm = NormSpec(config["rms_norm_eps"], offset=1.0)
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if value_heads % key_heads:
        raise ModelLoadError(
            f"config.json: {value_heads} value heads (linear_num_value_heads) do not fit {key_heads} key heads "
            "(linear_num_key_heads)"
        )
    delta = DeltaSpec(
        key_heads,
        value_heads,
        config["linear_key_head_dim"],
        config["linear_value_head_dim"],
        config["linear_conv_kernel_dim"],
    )
    interval = config["full_attention_interval"]
    kinds = config.get("layer_types") or [
        "full_attention" if layer % interval == interval - 1 else "linear_attention"
        for layer in range(config["num_hidden_layers"])
    ]
    return usual_spec(
        with_sections(config, [11, 11, 10], mrope_interleaved=True),
        norm=norm,
        rope_part=0.25,
        states=[delta if kind == "linear_attention" else None for kind in kinds],
        output_gate="elements",
        qkv_bias=config["attention_bias"],
        output_bias=config["attention_bias"],
        head_norm=HeadNormSpec("head", norm),
    )


def _qwen35_moe(config: Config) -> ArchSpec:
    return replace(
        _qwen35(config), experts=qwen3_experts(config, shared_size=config["shared_expert_intermediate_size"])
    )


_IMAGES: dict[str, Any] = {
    **QWEN_TOWER,
    "image_token_id": 248056,
    "video_token_id": 248057,
    "videos": True,
    "frame_ends": {"vision_start_token_id": 248053, "vision_end_token_id": 248054},
}


def _gguf_traits(metadata: Metadata) -> Config:
    value_heads = metadata["ssm.time_step_rank"]
    return {
        **(gguf_sections(metadata) if metadata.sections else {}),
        "full_attention_interval": metadata.get("full_attention_interval", 4),
        "linear_conv_kernel_dim": metadata["ssm.conv_kernel"],
        "linear_key_head_dim": metadata["ssm.state_size"],
        "linear_value_head_dim": metadata["ssm.inner_size"] // value_heads,
        "linear_num_key_heads": metadata["ssm.group_count"],
        "linear_num_value_heads": value_heads,
    }


def _gguf_experts(metadata: Metadata) -> Config:
    return {
        **_gguf_traits(metadata),
        **gguf_experts(metadata),
        "shared_expert_intermediate_size": metadata["expert_shared_feed_forward_length"],
    }


def _gguf_vision(clip: Clip) -> Config:
    if layers := clip.deepstack_layers:
        raise ModelLoadError(
            f"--mmproj {clip.header.path} has features for {len(layers)} layers, which Qwen3.5 does not take: give the "
            "mmproj file that was made of the same model"
        )
    return {**QWEN3_GGUF_TOWER.vision(clip), "model_type": "qwen3_5"}


_GGUF_TEXT = GGUFText(
    _gguf_traits,
    norm_offset=1.0,
    has_sections=True,
    layer_names={
        "post_attention_norm": "mlp_norm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_a": "linear_attn.A_log",
        "ssm_dt": "linear_attn.dt_bias",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    },
)

FAMILIES = (
    LanguageFamily(
        model_type="qwen3_5_text",
        architecture="Qwen3_5ForCausalLM",
        defaults=_TEXT,
        build=_qwen35,
        gguf={"qwen35": _GGUF_TEXT},
        models="Qwen3.5 without images",
    ),
    LanguageFamily(
        model_type="qwen3_5_moe_text",
        architecture="Qwen3_5MoeForCausalLM",
        defaults={
            **_TEXT,
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 8,
            "num_experts": 256,
        },
        build=_qwen35_moe,
        names=QWEN3_MOE_NAMES,
        gguf={"qwen35moe": replace(_GGUF_TEXT, traits=_gguf_experts, has_experts=True)},
        models="Qwen3.5 with experts, without images",
    ),
    VisionFamily(
        model_type="qwen3_5_moe",
        architecture="Qwen3_5MoeForConditionalGeneration",
        text_type="qwen3_5_moe_text",
        names=QWEN3_VISION_NAMES,
        **_IMAGES,
        models="Qwen3.5 35B-A3B, Qwen3.6 35B-A3B",
        short_names=(
            NamedModel("qwen3.5:35b", "Qwen/Qwen3.5-35B-A3B", 35107181936, 508559360, 955130608),
            NamedModel("qwen3.6:35b", "Qwen/Qwen3.6-35B-A3B", 35107181936, 508559360, 955130608),
        ),
    ),
    VisionFamily(
        model_type="qwen3_5",
        architecture="Qwen3_5ForConditionalGeneration",
        text_type="qwen3_5_text",
        names=QWEN3_VISION_NAMES,
        **_IMAGES,
        gguf={
            "qwen3vl_merger": replace(
                QWEN3_GGUF_TOWER,
                vision=_gguf_vision,
                text_types={"qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text"},
            ),
        },
        models="Qwen3.5 0.8B to 27B, Qwen3.6 27B, Qwen3.8 27B",
        short_names=(
            NamedModel("qwen3.5:0.8b", "Qwen/Qwen3.5-0.8B", 852985920, 254279680, 100592896),
            NamedModel("qwen3.5:2b", "Qwen/Qwen3.5-2B", 2213241664, 508559360, 331416576),
            NamedModel("qwen3.5:4b", "Qwen/Qwen3.5-4B", 4539265536, 635699200, 333514240),
            NamedModel("qwen3.5:9b", "Qwen/Qwen3.5-9B", 9409813744, 1017118720, 1473129200),
            NamedModel("qwen3.5:27b", "Qwen/Qwen3.5-27B", 27356728560, 1271398400, 1732128496),
            NamedModel("qwen3.6:27b", "Qwen/Qwen3.6-27B", 27356728560, 1271398400, 1732128496),
            NamedModel("qwen3.8:27b", "Qwen/Qwen3.8-27B", 27356728560, 1271398400, 1732128496),
        ),
    ),
)
