"""Qwen3-VL (https://arxiv.org/abs/2511.21631)."""

from __future__ import annotations

from dataclasses import replace

from vlmserve.errors import ModelLoadError
from vlmserve.families.family import LanguageFamily, NamedModel, VisionFamily, vision_section
from vlmserve.families.gguf import Clip, GGUFTower
from vlmserve.families.qwen2_vl import (
    GGUF_TOKENS,
    QWEN_TOKENS,
    QWEN_TOWER,
    qwen_images,
    qwen_mlp,
    qwen_names,
    qwen_sizes,
)
from vlmserve.families.qwen3 import QWEN3, QWEN3_MOE, QWEN3_MOE_NAMES, qwen3, qwen3_experts
from vlmserve.families.spec import ArchSpec, Config, Names, with_sections


def deepstack_layers(vision_config: Config) -> tuple[int, ...]:
    """Tower layers whose outputs are also merged, each for one of the decoder's first layers
    (https://arxiv.org/abs/2406.04334).
    """
    return tuple(vision_config.get("deepstack_visual_indexes", (8, 16, 24)))


def _qwen3_vl(config: Config) -> ArchSpec:
    spec = qwen3(with_sections(config, [24, 20, 20], mrope_interleaved=True))
    return with_deepstack(spec, config["deepstack"])


def with_deepstack(spec: ArchSpec, count: int) -> ArchSpec:
    """count: number of first layers that take image features."""
    if count > len(spec.mixers):
        raise ModelLoadError(
            f"config.json: images have features for {count} layers (deepstack_visual_indexes), and the decoder has "
            f"{len(spec.mixers)}"
        )
    return replace(spec, deepstack=count)


def _qwen3_vl_moe(config: Config) -> ArchSpec:
    """Transformers always divides by the sum of the chosen scores, whatever the config says."""
    return replace(_qwen3_vl(config), experts=qwen3_experts({**config, "norm_topk_prob": True}))


def _text_fields(config: Config) -> Config:
    return {"deepstack": len(deepstack_layers(vision_section(config)))}


QWEN3_VISION_NAMES: Names = (
    (r"(visual\.blocks\.\d+\.mlp)\.linear_fc", r"\1.fc"),
    (r"(visual\.(?:merger|deepstack_merger_list\.\d+))\.norm\.", r"\1.ln_q."),
    (r"(visual\.(?:merger|deepstack_merger_list\.\d+))\.linear_fc1\.", r"\1.mlp.0."),
    (r"(visual\.(?:merger|deepstack_merger_list\.\d+))\.linear_fc2\.", r"\1.mlp.2."),
)

_MERGERS: Names = (
    (r"v\.patch_embd\.bias", "visual.patch_embed.proj.bias"),
    (r"v\.position_embd\.weight", "visual.pos_embed.weight"),
    (r"v\.post_ln\.(\w+)", r"visual.merger.norm.\1"),
    (r"mm\.0\.(\w+)", r"visual.merger.linear_fc1.\1"),
    (r"mm\.2\.(\w+)", r"visual.merger.linear_fc2.\1"),
    (r"v\.deepstack\.(\d+)\.norm\.(\w+)", r"visual.deepstack_merger_list.\1.norm.\2"),
    (r"v\.deepstack\.(\d+)\.fc([12])\.(\w+)", r"visual.deepstack_merger_list.\1.linear_fc\2.\3"),
)


def _vision(clip: Clip) -> Config:
    return {
        **qwen_sizes(clip),
        "model_type": "qwen3_vl",
        "hidden_size": clip["embedding_length"],
        "intermediate_size": clip.intermediate_size,
        "out_hidden_size": clip.tensor("mm.2.weight").shape[0],
        "hidden_act": "gelu_pytorch_tanh",
        "num_position_embeddings": clip.tensor("v.position_embd.weight").shape[0],
        "deepstack_visual_indexes": clip.deepstack_layers,
    }


def _videos(clip: Clip) -> Config:
    """The bounds count all frames of a video together."""
    settings = qwen_images(64 * 64, 24 * 1024 * 1024)(clip)
    return {**settings, "image_processor_type": None, "video_processor_type": "Qwen3VLVideoProcessor"}


QWEN3_GGUF_TOWER = GGUFTower(
    vision=_vision,
    settings=qwen_images(256 * 256, 4096 * 4096),
    videos=_videos,
    names=qwen_names(*qwen_mlp("linear_fc1", "linear_fc2"), *_MERGERS),
    output="mm.2.weight",
    text_types={"qwen3vl": "qwen3_vl_text", "qwen3vlmoe": "qwen3_vl_moe_text"},
    tokens=GGUF_TOKENS,
    swaps=False,
)

_FRAME_ENDS = {"vision_start_token_id": 151652, "vision_end_token_id": 151653}

FAMILIES = (
    LanguageFamily(
        model_type="qwen3_vl_text",
        defaults={**QWEN3, "max_position_embeddings": 128000, "rope_theta": 5e5, "deepstack": 0},
        build=_qwen3_vl,
    ),
    LanguageFamily(
        model_type="qwen3_vl_moe_text",
        defaults={**QWEN3_MOE, "head_dim": None, "max_position_embeddings": 128000, "rope_theta": 5e5, "deepstack": 0},
        build=_qwen3_vl_moe,
        names=QWEN3_MOE_NAMES,
    ),
    VisionFamily(
        model_type="qwen3_vl",
        architecture="Qwen3VLForConditionalGeneration",
        text_type="qwen3_vl_text",
        text_fields=_text_fields,
        names=QWEN3_VISION_NAMES,
        **QWEN_TOWER,
        **QWEN_TOKENS,
        frame_ends=_FRAME_ENDS,
        gguf={"qwen3vl_merger": QWEN3_GGUF_TOWER},
        models="Qwen3-VL 2B to 32B",
        short_names=(
            NamedModel("qwen3-vl:2b", "Qwen/Qwen3-VL-2B-Instruct", 2127532032, 311164928, 406957056),
            NamedModel("qwen3-vl:4b", "Qwen/Qwen3-VL-4B-Instruct", 4437815808, 388956160, 415347712),
            NamedModel("qwen3-vl:8b", "Qwen/Qwen3-VL-8B-Instruct", 8767123696, 622329856, 1198718192),
            NamedModel("qwen3-vl:32b", "Qwen/Qwen3-VL-32B-Instruct", 33357390064, 777912320, 1373179120),
            NamedModel("qwen3-vl-embedding:2b", "Qwen/Qwen3-VL-Embedding-2B", 2127532032, 311164928, 406957056),
            NamedModel("qwen3-vl-embedding:8b", "Qwen/Qwen3-VL-Embedding-8B", 8144793840, 622329856, 576388336),
            NamedModel("qwen3-vl-reranker:2b", "Qwen/Qwen3-VL-Reranker-2B", 2127532032, 311164928, 406957056),
            NamedModel("qwen3-vl-reranker:8b", "Qwen/Qwen3-VL-Reranker-8B", 8767123696, 622329856, 1198718192),
        ),
    ),
    VisionFamily(
        model_type="qwen3_vl_moe",
        architecture="Qwen3VLMoeForConditionalGeneration",
        text_type="qwen3_vl_moe_text",
        text_fields=_text_fields,
        names=QWEN3_VISION_NAMES,
        **QWEN_TOWER,
        **QWEN_TOKENS,
        frame_ends=_FRAME_ENDS,
        models="Qwen3-VL 30B-A3B, 235B-A22B",
        short_names=(NamedModel("qwen3-vl:30b", "Qwen/Qwen3-VL-30B-A3B-Instruct", 31070754032, 311164928, 849796336),),
    ),
)
