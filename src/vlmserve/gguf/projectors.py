"""The kinds of vision towers and projectors in GGUF files, as Hugging Face's configurations of the same models say
them. Imports no torch.

What a file says is what llama.cpp's conversion writes and what its ``tools/mtmd/clip.cpp`` reads
(https://github.com/ggml-org/llama.cpp). What it does not say is that of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vlmserve.errors import ModelLoadError
from vlmserve.gguf.clip import Clip, Config, Names, Projector
from vlmserve.gguf.qwen_projectors import QWEN_PROJECTORS


def _clip_names(tower: str) -> Names:
    """Of towers whose layers are CLIP's. tower: what its tensors' names begin with."""
    layer = rf"{tower}.encoder.layers.\1"
    return (
        (r"v\.class_embd", f"{tower}.embeddings.class_embedding"),
        (r"v\.patch_embd\.(\w+)", rf"{tower}.embeddings.patch_embedding.\1"),
        (r"v\.position_embd\.weight", f"{tower}.embeddings.position_embedding.weight"),
        (r"v\.pre_ln\.(\w+)", rf"{tower}.pre_layrnorm.\1"),
        (r"v\.post_ln\.(\w+)", rf"{tower}.post_layernorm.\1"),
        (r"v\.blk\.(\d+)\.ln([12])\.(\w+)", rf"{layer}.layer_norm\2.\3"),
        (r"v\.blk\.(\d+)\.attn_([qkv])\.(\w+)", rf"{layer}.self_attn.\2_proj.\3"),
        (r"v\.blk\.(\d+)\.attn_out\.(\w+)", rf"{layer}.self_attn.out_proj.\2"),
        (r"v\.blk\.(\d+)\.ffn_up\.(\w+)", rf"{layer}.mlp.fc1.\2"),
        (r"v\.blk\.(\d+)\.ffn_down\.(\w+)", rf"{layer}.mlp.fc2.\2"),
    )


def _clip_sizes(clip: Clip) -> Config:
    return {
        "hidden_size": clip["embedding_length"],
        "intermediate_size": clip.intermediate_size,
        "num_hidden_layers": clip["block_count"],
        "num_attention_heads": clip["attention.head_count"],
        "image_size": clip["image_size"],
        "patch_size": clip["patch_size"],
        "layer_norm_eps": clip["attention.layer_norm_epsilon"],
    }


def _llava_vision(clip: Clip) -> Config:
    gelu = clip.header.values.get("clip.use_gelu", False)
    return {**_clip_sizes(clip), "model_type": "clip_vision_model", "hidden_act": "gelu" if gelu else "quick_gelu"}


def _llava(clip: Clip) -> Config:
    """The file has no layers above those that count, unless it says which these are."""
    config = {"vision_feature_layer": clip.array("feature_layer") or -1, "vision_feature_select_strategy": "default"}
    return {**config, "model_type": "llava_next", **_llava_resolutions(clip)} if _cuts_images(clip) else config


def _llava_settings(clip: Clip) -> Config:
    size = clip["image_size"]
    crop = {"height": size, "width": size}
    settings = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": size}, "crop_size": crop}
    if not _cuts_images(clip):
        return settings
    return {**settings, "image_processor_type": "LlavaNextImageProcessor", **_llava_resolutions(clip)}


def _cuts_images(clip: Clip) -> bool:
    """Whether it is LLaVA 1.6's."""
    return bool(clip.get("mm_patch_merge_type") == "spatial_unpad")


def _llava_resolutions(clip: Clip) -> Config:
    """Heights and widths; the file has each width before its height."""
    edges = clip.array("image_grid_pinpoints")
    if not edges or len(edges) % 2:
        raise ModelLoadError(
            f"{clip.header.path}: clip.vision.image_grid_pinpoints is not a list of widths and heights"
        )
    return {"image_grid_pinpoints": [[height, width] for width, height in zip(edges[::2], edges[1::2], strict=True)]}


def _siglip_vision(kind: str) -> Callable[[Clip], Config]:
    return lambda clip: {**_clip_sizes(clip), "model_type": kind, "hidden_act": "gelu_pytorch_tanh"}


def _idefics3_settings(clip: Clip) -> Config:
    """Images are resized to four tiles a side where the file does not say, as in the published checkpoints."""
    tile = clip["image_size"]
    longest = {"longest_edge": clip.get("preproc_image_size", 4 * tile)}
    return {"image_processor_type": "Idefics3ImageProcessor", "size": longest, "max_image_size": {"longest_edge": tile}}


def _scale(clip: Clip, default: int) -> int:
    """Patches along each side that become one embedding."""
    return int(clip.get("projector.scale_factor", default))


def _intern_vision(clip: Clip) -> Config:
    return {
        **_clip_sizes(clip),
        "model_type": "internvl_vision",
        "hidden_act": "silu" if clip.header.values.get("clip.use_silu") else "gelu",
        "attention_bias": clip.has("v.blk.0.attn_q.bias"),
        "use_qk_norm": clip.has("v.blk.0.attn_q_norm.weight"),
        "norm_type": "layer_norm" if clip.has("v.blk.0.ln1.bias") else "rms_norm",
    }


def _intern_settings(clip: Clip) -> Config:
    side = clip["image_size"]
    least, most = clip.get("preproc_min_tiles", 1), clip.get("preproc_max_tiles", 12)
    size = {"height": side, "width": side}
    return {"image_processor_type": "GotOcr2ImageProcessor", "size": size, "min_patches": least, "max_patches": most}


_INTERN_LAYER = r"vision_tower.encoder.layer.\1"
_INTERN_NAMES: Names = (
    (r"v\.class_embd", "vision_tower.embeddings.cls_token"),
    (r"v\.patch_embd\.(\w+)", r"vision_tower.embeddings.patch_embeddings.projection.\1"),
    (r"v\.position_embd\.weight", "vision_tower.embeddings.position_embeddings"),
    (r"v\.blk\.(\d+)\.ln1\.(\w+)", rf"{_INTERN_LAYER}.layernorm_before.\2"),
    (r"v\.blk\.(\d+)\.ln2\.(\w+)", rf"{_INTERN_LAYER}.layernorm_after.\2"),
    (r"v\.blk\.(\d+)\.ls([12])\.weight", rf"{_INTERN_LAYER}.lambda_\2"),
    (r"v\.blk\.(\d+)\.attn_([qkv])\.(\w+)", rf"{_INTERN_LAYER}.attention.\2_proj.\3"),
    (r"v\.blk\.(\d+)\.attn_([qk])_norm\.weight", rf"{_INTERN_LAYER}.attention.\2_norm.weight"),
    (r"v\.blk\.(\d+)\.attn_out\.(\w+)", rf"{_INTERN_LAYER}.attention.projection_layer.\2"),
    (r"v\.blk\.(\d+)\.ffn_up\.(\w+)", rf"{_INTERN_LAYER}.mlp.fc1.\2"),
    (r"v\.blk\.(\d+)\.ffn_down\.(\w+)", rf"{_INTERN_LAYER}.mlp.fc2.\2"),
    (r"mm\.model\.mlp\.0\.(\w+)", r"multi_modal_projector.layer_norm.\1"),
    (r"mm\.model\.mlp\.1\.(\w+)", r"multi_modal_projector.linear_1.\1"),
    (r"mm\.model\.mlp\.3\.(\w+)", r"multi_modal_projector.linear_2.\1"),
)


def _gemma3_more(clip: Clip) -> Config:
    return {"mm_tokens_per_image": (clip["image_size"] // clip["patch_size"] // _scale(clip, 4)) ** 2}


def _gemma3_settings(clip: Clip) -> Config:
    size = {"height": clip["image_size"], "width": clip["image_size"]}
    return {"image_processor_type": "Gemma3ImageProcessor", "size": size}


_PIXTRAL_LAYER = r"vision_tower.transformer.layers.\1"
_PIXTRAL_NAMES: Names = (
    (r"v\.patch_embd\.weight", "vision_tower.patch_conv.weight"),
    (r"v\.pre_ln\.weight", "vision_tower.ln_pre.weight"),
    (r"v\.blk\.(\d+)\.ln1\.weight", f"{_PIXTRAL_LAYER}.attention_norm.weight"),
    (r"v\.blk\.(\d+)\.ln2\.weight", f"{_PIXTRAL_LAYER}.ffn_norm.weight"),
    (r"v\.blk\.(\d+)\.attn_([qkv])\.weight", rf"{_PIXTRAL_LAYER}.attention.\2_proj.weight"),
    (r"v\.blk\.(\d+)\.attn_out\.weight", f"{_PIXTRAL_LAYER}.attention.o_proj.weight"),
    (r"v\.blk\.(\d+)\.ffn_(gate|up|down)\.weight", rf"{_PIXTRAL_LAYER}.feed_forward.\2_proj.weight"),
    (r"mm\.([12])\.(\w+)", r"multi_modal_projector.linear_\1.\2"),
    (r"mm\.input_norm\.weight", "multi_modal_projector.norm.weight"),
    (r"mm\.patch_merger\.weight", "multi_modal_projector.patch_merger.merging_layer.weight"),
    # A row of the language model's own table.
    (r"v\.token_embd\.img_break(\.weight)?", ""),
)


def _pixtral_vision(clip: Clip) -> Config:
    act = "silu" if clip.header.values.get("clip.use_silu") else "gelu"
    return {**_clip_sizes(clip), "model_type": "pixtral", "hidden_act": act}


def _pixtral_more(clip: Clip) -> Config:
    """Mistral Small 3 merges patches, Pixtral 12B does not."""
    common = {"vision_feature_layer": -1, "multimodal_projector_bias": clip.has("mm.1.bias")}
    if not clip.has("mm.patch_merger.weight"):
        return {**common, "vision_feature_select_strategy": "full"}
    return {**common, "model_type": "mistral3", "spatial_merge_size": clip.get("spatial_merge_size", 2)}


def _pixtral_settings(clip: Clip) -> Config:
    return {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": clip["image_size"]}}


PROJECTORS: Mapping[str, Projector] = {
    # LLaVA 1.5 and 1.6: images are resized and cropped as the -hf checkpoints say.
    "mlp": Projector(
        "llava",
        _llava_vision,
        _llava_settings,
        (
            *_clip_names("vision_tower"),
            (r"mm\.0\.(\w+)", r"multi_modal_projector.linear_1.\1"),
            (r"mm\.2\.(\w+)", r"multi_modal_projector.linear_2.\1"),
            (r"(model|v)\.image_newline", "image_newline"),
        ),
        "mm.2.weight",
        more=_llava,
        else_unknown=True,
    ),
    **QWEN_PROJECTORS,
    "idefics3": Projector(
        "idefics3",
        _siglip_vision("idefics3_vision"),
        _idefics3_settings,
        (
            *_clip_names("vision_model"),
            (r"mm\.model\.fc\.weight", "connector.modality_projection.proj.weight"),
        ),
        "mm.model.fc.weight",
        more=lambda clip: {"scale_factor": _scale(clip, 2)},
    ),
    "internvl": Projector(
        "internvl",
        _intern_vision,
        _intern_settings,
        _INTERN_NAMES,
        "mm.model.mlp.3.weight",
        more=lambda clip: {"downsample_ratio": 1 / _scale(clip, 2), "projector_hidden_act": "gelu"},
        tokens={"image_token_id": "<IMG_CONTEXT>"},
        swaps=False,
    ),
    "pixtral": Projector(
        "llava",
        _pixtral_vision,
        _pixtral_settings,
        _PIXTRAL_NAMES,
        "mm.2.weight",
        more=_pixtral_more,
        tokens={"image_token_id": "[IMG]"},
        interleaved=True,
        swaps=False,
    ),
    # The number of embeddings is that of the published checkpoints where the file does not say.
    "gemma3": Projector(
        "gemma3",
        _siglip_vision("siglip_vision_model"),
        _gemma3_settings,
        (
            *_clip_names("vision_tower"),
            (r"mm\.input_projection\.weight", "multi_modal_projector.mm_input_projection_weight"),
            (r"mm\.soft_emb_norm\.weight", "multi_modal_projector.mm_soft_emb_norm.weight"),
        ),
        "mm.input_projection.weight",
        axis=1,
        more=_gemma3_more,
        text_types={"gemma3": "gemma3_text"},
        tokens={
            "image_token_id": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        else_unknown=True,
        norm_offset=1.0,
    ),
}
"""By the names that files have for them (``clip.projector_type``)."""
