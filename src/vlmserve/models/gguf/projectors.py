"""The kinds of vision towers and projectors in GGUF files, as Hugging Face's configurations of the same models say
them. Imports no torch.

What a file says is what llama.cpp's conversion writes and what its ``tools/mtmd/clip.cpp`` reads
(https://github.com/ggml-org/llama.cpp). What it does not say is that of the published checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlmserve.errors import ModelLoadError
from vlmserve.models.gguf.header import Header, TensorInfo

Config = dict[str, Any]


class Clip:
    """The values of a tower, without the prefix that they share. Raises ModelLoadError for one that is missing."""

    def __init__(self, header: Header) -> None:
        self.header = header

    def get(self, key: str, default: Any = None) -> Any:
        return self.header.values.get(f"clip.vision.{key}", default)

    def array(self, key: str) -> list[Any]:
        return self.header.array(f"clip.vision.{key}")

    def __getitem__(self, key: str) -> Any:
        if (value := self.get(key)) is None:
            raise ModelLoadError(f"{self.header.path} lacks clip.vision.{key}")
        return value

    def tensor(self, name: str) -> TensorInfo:
        if name not in self.header.tensors:
            raise ModelLoadError(f"{self.header.path} lacks {name}: it is not a complete vision tower")
        return self.header.tensors[name]

    def has(self, name: str) -> bool:
        return name in self.header.tensors

    @property
    def intermediate_size(self) -> int:
        """Of the MLPs, by their weights: some conversions write another number."""
        width = self["embedding_length"]
        shapes = [self.tensor(f"v.blk.0.ffn_{part}.weight").shape for part in ("up", "down")]
        return next((shape[0] for shape in shapes if shape[-1] == width), shapes[0][0])

    @property
    def deepstack_layers(self) -> list[int]:
        """The layers whose outputs are merged too."""
        return [layer for layer, merged in enumerate(self.array("is_deepstack_layers")) if merged]


Names = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Projector:
    """A kind of tower and projector.

    model_type: as config.json names the whole. vision: what it says of the tower. settings: what
    preprocessor_config.json says. videos: likewise video_preprocessor_config.json; None: there is none. names: regular
    expressions for the names of tensors in the file, and what to put in their place, tried in turn; empty for a tensor
    that is left out. output, axis: the weight and its axis that is as long as embeddings are wide. more: what else
    config.json says of the whole. text_types: model types of its language models, by the architectures of their files;
    empty: all go with it. tokens: fields of config.json with the tokens whose ids they are, the placeholder first.
    else_unknown: whether the unknown token, which ordinary text never becomes, is the placeholder of a vocabulary
    without that one. interleaved: rows of queries and keys are in the order in which neighbours pair. norm_offset: was
    added to the norm before the projector. swaps: whether old files have the two matrices of MLPs under each other's
    names.
    """

    model_type: str
    vision: Callable[[Clip], Config]
    settings: Callable[[Clip], Config]
    names: Names
    output: str
    axis: int = 0
    more: Callable[[Clip], Config] = lambda clip: {}
    text_types: Mapping[str, str] = field(default_factory=dict)
    tokens: Mapping[str, str] = field(default_factory=lambda: {"image_token_id": "<image>"})
    videos: Callable[[Clip], Config] | None = None
    else_unknown: bool = False
    interleaved: bool = False
    norm_offset: float = 0.0
    swaps: bool = True


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
