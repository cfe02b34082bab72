"""The vision towers and projectors of the Qwen-VLs in GGUF files, and of the models whose towers are like theirs, as
Hugging Face's configurations of the same models say them. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from vlmserve.gguf.clip import Clip, Config, Names, Projector


def _qwen_names(*names: tuple[str, str]) -> Names:
    """Of Qwen-VL's towers. names: those that not all have."""
    return (
        (r"v\.patch_embd\.weight(\.1)?", "visual.patch_embed.proj.weight"),
        (r"v\.blk\.(\d+)\.ln([12])\.(\w+)", r"visual.blocks.\1.norm\2.\3"),
        (r"v\.blk\.(\d+)\.attn_(?:qkv|[qkv])\.(\w+)", r"visual.blocks.\1.attn.qkv.\2"),
        (r"v\.blk\.(\d+)\.attn_out\.(\w+)", r"visual.blocks.\1.attn.proj.\2"),
        *names,
    )


def _qwen_mlp(up: str, down: str, gate: str = "") -> Names:
    """gate: empty for one without gates."""
    parts = {"up": up, "down": down, **({"gate": gate} if gate else {})}
    return tuple((rf"v\.blk\.(\d+)\.ffn_{old}\.(\w+)", rf"visual.blocks.\1.mlp.{new}.\2") for old, new in parts.items())


_QWEN2_MERGER: Names = (
    (r"v\.post_ln\.(\w+)", r"visual.merger.ln_q.\1"),
    (r"mm\.([02])\.(\w+)", r"visual.merger.mlp.\1.\2"),
)
_QWEN3_MERGERS: Names = (
    (r"v\.patch_embd\.bias", "visual.patch_embed.proj.bias"),
    (r"v\.position_embd\.weight", "visual.pos_embed.weight"),
    (r"v\.post_ln\.(\w+)", r"visual.merger.norm.\1"),
    (r"mm\.0\.(\w+)", r"visual.merger.linear_fc1.\1"),
    (r"mm\.2\.(\w+)", r"visual.merger.linear_fc2.\1"),
    (r"v\.deepstack\.(\d+)\.norm\.(\w+)", r"visual.deepstack_merger_list.\1.norm.\2"),
    (r"v\.deepstack\.(\d+)\.fc([12])\.(\w+)", r"visual.deepstack_merger_list.\1.linear_fc\2.\3"),
)
_QWEN_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


def _qwen_sizes(clip: Clip) -> Config:
    return {
        "depth": clip["block_count"],
        "num_heads": clip["attention.head_count"],
        "patch_size": clip["patch_size"],
        "spatial_merge_size": clip.get("spatial_merge_size", 2),
        "temporal_patch_size": 2,
    }


def _qwen2_vision(clip: Clip) -> Config:
    """Its ``hidden_size`` is the decoder's."""
    width = clip["embedding_length"]
    # Rounded up, so that the product with the width is not less.
    ratio = math.nextafter(clip.intermediate_size / width, math.inf)
    output = clip.tensor("mm.2.weight").shape[0]
    sizes = {"embed_dim": width, "hidden_size": output, "mlp_ratio": ratio}
    return {**_qwen_sizes(clip), **sizes, "model_type": "qwen2_vl", "hidden_act": "quick_gelu"}


def _qwen25_vision(clip: Clip) -> Config:
    every, layers = clip["n_wa_pattern"], clip["block_count"]
    return {
        **_qwen_sizes(clip),
        "model_type": "qwen2_5_vl",
        "hidden_size": clip["embedding_length"],
        "intermediate_size": clip.intermediate_size,
        "out_hidden_size": clip.tensor("mm.2.weight").shape[0],
        "hidden_act": "silu",
        "window_size": clip.get("window_size", 112),
        "fullatt_block_indexes": list(range(every - 1, layers, every)),
        "tokens_per_second": 2,
    }


def _qwen3_vision(clip: Clip) -> Config:
    return {
        **_qwen_sizes(clip),
        "model_type": "qwen3_vl",
        "hidden_size": clip["embedding_length"],
        "intermediate_size": clip.intermediate_size,
        "out_hidden_size": clip.tensor("mm.2.weight").shape[0],
        "hidden_act": "gelu_pytorch_tanh",
        "num_position_embeddings": clip.tensor("v.position_embd.weight").shape[0],
        "deepstack_visual_indexes": clip.deepstack_layers,
    }


def _qwen_settings(least: int, most: int) -> Callable[[Clip], Config]:
    """least, most: pixels of an image where the file does not say, those of the published checkpoints."""

    def settings(clip: Clip) -> Config:
        return {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": clip["patch_size"],
            "merge_size": clip.get("spatial_merge_size", 2),
            "temporal_patch_size": 2,
            "min_pixels": clip.get("image_min_pixels", least),
            "max_pixels": clip.get("image_max_pixels", most),
        }

    return settings


def _qwen3_videos(clip: Clip) -> Config:
    """The published bounds are those of all frames of a video together."""
    settings = _qwen_settings(64 * 64, 24 * 1024 * 1024)(clip)
    return {**settings, "image_processor_type": None, "video_processor_type": "Qwen3VLVideoProcessor"}


_GLM_NAMES: Names = (
    (r"v\.patch_embd\.bias", "visual.patch_embed.proj.bias"),
    (r"v\.blk\.(\d+)\.attn_([qk])_norm\.weight", r"visual.blocks.\1.attn.\2_norm.weight"),
    (r"v\.post_ln\.weight", "visual.post_layernorm.weight"),
    (r"mm\.patch_merger\.(\w+)", r"visual.downsample.\1"),
    (r"mm\.model\.fc\.weight", "visual.merger.proj.weight"),
    (r"mm\.post_norm\.(\w+)", r"visual.merger.post_projection_norm.\1"),
    (r"mm\.(gate|up|down)\.weight", r"visual.merger.\1_proj.weight"),
)
_GLM_TOKENS = {
    f"{field}_token_id": f"<|{token}|>"
    for field, token in {
        "image": "image",
        "video": "video",
        "image_start": "begin_of_image",
        "image_end": "end_of_image",
        "video_start": "begin_of_video",
        "video_end": "end_of_video",
    }.items()
}


def _glm_vision(clip: Clip) -> Config:
    return {
        **_qwen_sizes(clip),
        "model_type": "glm_ocr_vision",
        "hidden_size": clip["embedding_length"],
        "intermediate_size": clip.intermediate_size,
        "out_hidden_size": clip.tensor("mm.down.weight").shape[0],
        "hidden_act": "gelu" if clip.header.values.get("clip.use_gelu") else "silu",
        "attention_bias": clip.has("v.blk.0.attn_out.bias"),
        "rms_norm_eps": clip["attention.layer_norm_epsilon"],
    }


def _glm_settings(clip: Clip) -> Config:
    """Its processor's bounds count an image twice, as a video of two frames."""
    own = _qwen_settings(112 * 112 // 2, 28 * 28 * 6144)(clip)
    bounds = {"shortest_edge": 2 * own.pop("min_pixels"), "longest_edge": 2 * own.pop("max_pixels")}
    return {**own, "image_processor_type": "Glm46VImageProcessor", "size": bounds}


_PADDLEOCR_TOWER = "visual.vision_model"
_PADDLEOCR_LAYER = rf"{_PADDLEOCR_TOWER}.encoder.layers.\1"
_PADDLEOCR_NAMES: Names = (
    (r"v\.patch_embd\.(\w+)", rf"{_PADDLEOCR_TOWER}.embeddings.patch_embedding.\1"),
    (r"v\.position_embd\.weight", f"{_PADDLEOCR_TOWER}.embeddings.position_embedding.weight"),
    (r"v\.post_ln\.(\w+)", rf"{_PADDLEOCR_TOWER}.post_layernorm.\1"),
    (r"v\.blk\.(\d+)\.ln([12])\.(\w+)", rf"{_PADDLEOCR_LAYER}.layer_norm\2.\3"),
    (r"v\.blk\.(\d+)\.attn_([qkv])\.(\w+)", rf"{_PADDLEOCR_LAYER}.self_attn.\2_proj.\3"),
    (r"v\.blk\.(\d+)\.attn_out\.(\w+)", rf"{_PADDLEOCR_LAYER}.self_attn.out_proj.\2"),
    (r"v\.blk\.(\d+)\.ffn_up\.(\w+)", rf"{_PADDLEOCR_LAYER}.mlp.fc1.\2"),
    (r"v\.blk\.(\d+)\.ffn_down\.(\w+)", rf"{_PADDLEOCR_LAYER}.mlp.fc2.\2"),
    (r"mm\.input_norm\.(\w+)", r"mlp_AR.pre_norm.\1"),
    (r"mm\.([12])\.(\w+)", r"mlp_AR.linear_\1.\2"),
)


def _paddleocr_vision(clip: Clip) -> Config:
    """Files say how large an image may be instead of the size that their position embeddings are for."""
    side = math.isqrt(clip.tensor("v.position_embd.weight").shape[0])
    return {
        "model_type": "paddleocr_vl_vision",
        "num_hidden_layers": clip["block_count"],
        "num_attention_heads": clip["attention.head_count"],
        "hidden_size": clip["embedding_length"],
        "intermediate_size": clip.intermediate_size,
        "image_size": side * clip["patch_size"],
        "patch_size": clip["patch_size"],
        "spatial_merge_size": clip.get("spatial_merge_size", 2),
        "layer_norm_eps": clip["attention.layer_norm_epsilon"],
        "hidden_act": "gelu_pytorch_tanh",
    }


def _paddleocr_settings(clip: Clip) -> Config:
    own = _qwen_settings(147384, 2822400)(clip)
    return {**own, "image_processor_type": "PaddleOCRVLImageProcessor", "temporal_patch_size": 1}


QWEN_PROJECTORS: Mapping[str, Projector] = {
    # Bounds of images, windows and times of frames are those of the published checkpoints.
    "qwen2vl_merger": Projector(
        "qwen2_vl",
        _qwen2_vision,
        _qwen_settings(56 * 56, 28 * 28 * 16384),
        _qwen_names(*_qwen_mlp("fc1", "fc2"), *_QWEN2_MERGER),
        "mm.2.weight",
        text_types={"qwen2vl": "qwen2_vl_text"},
        tokens=_QWEN_TOKENS,
    ),
    "qwen2.5vl_merger": Projector(
        "qwen2_5_vl",
        _qwen25_vision,
        _qwen_settings(56 * 56, 28 * 28 * 16384),
        _qwen_names(*_qwen_mlp("up_proj", "down_proj", "gate_proj"), *_QWEN2_MERGER),
        "mm.2.weight",
        text_types={"qwen2vl": "qwen2_5_vl_text"},
        tokens=_QWEN_TOKENS,
    ),
    "qwen3vl_merger": Projector(
        "qwen3_vl",
        _qwen3_vision,
        _qwen_settings(256 * 256, 4096 * 4096),
        _qwen_names(*_qwen_mlp("linear_fc1", "linear_fc2"), *_QWEN3_MERGERS),
        "mm.2.weight",
        text_types={"qwen3vl": "qwen3_vl_text"},
        tokens=_QWEN_TOKENS,
        videos=_qwen3_videos,
        swaps=False,
    ),
    "glm4v": Projector(
        "glm_ocr",
        _glm_vision,
        _glm_settings,
        _qwen_names(*_qwen_mlp("up_proj", "down_proj", "gate_proj"), *_GLM_NAMES),
        "mm.down.weight",
        text_types={"glm4": "glm_ocr_text"},
        tokens=_GLM_TOKENS,
        swaps=False,
    ),
    "paddleocr": Projector(
        "paddleocr_vl",
        _paddleocr_vision,
        _paddleocr_settings,
        _PADDLEOCR_NAMES,
        "mm.2.weight",
        text_types={"paddleocr": "paddleocr_vl_text"},
        tokens={
            "image_token_id": "<|IMAGE_PLACEHOLDER|>",
            "vision_start_token_id": "<|IMAGE_START|>",
            "vision_end_token_id": "<|IMAGE_END|>",
        },
        swaps=False,
    ),
}
"""By the names that files have for them."""
