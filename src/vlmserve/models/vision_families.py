"""The vision-language families: where each one's config has its parts, and what encodes its images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vlmserve.errors import ModelLoadError
from vlmserve.models.families import Names, decoder_family
from vlmserve.models.gemma3 import IMAGE_TOKEN_ID as GEMMA3_IMAGE_TOKEN_ID
from vlmserve.models.gemma3 import Gemma3Vision
from vlmserve.models.idefics3 import IMAGE_TOKEN_ID as IDEFICS3_IMAGE_TOKEN_ID
from vlmserve.models.idefics3 import Idefics3Vision
from vlmserve.models.internvl import IMAGE_TOKEN_ID as INTERNVL_IMAGE_TOKEN_ID
from vlmserve.models.internvl import InternVision
from vlmserve.models.llava import IMAGE_TOKEN_ID, LlavaNextVision, LlavaVision
from vlmserve.models.pixtral import IMAGE_TOKEN_ID as PIXTRAL_IMAGE_TOKEN_ID
from vlmserve.models.pixtral import PixtralVision
from vlmserve.models.protocols import VisionEncoder
from vlmserve.models.vision.blip import BlipTower, blip_vision_spec
from vlmserve.models.vision.moondream import MoondreamSpec, MoondreamTower
from vlmserve.models.vision.qwen import QwenVisionTower
from vlmserve.models.vision.qwen_spec import QwenVisionSpec, deepstack_layers
from vlmserve.models.vision.resampled import ResampledSpec, ResampledVision
from vlmserve.types import Bidirectional

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Vision:
    """What encodes images, and its modules under the names that weights have."""

    encoder: VisionEncoder
    modules: Mapping[str, nn.Module]


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """A row of the table.

    architecture: as config.json names it. text_type: the model type of a language model whose config does not name its
    own. build: from the whole config and the decoder's width. image_token_id: the placeholder of a config that names
    none; None: no token stands for an image. names: regular expressions for tensors' names in the files and what to put
    in their place. text_fields: what a config says of the language model elsewhere than in its part. reads: whether an
    encoder reads a question along with the image. section: of the config, without which a checkpoint of the
    architecture takes no images. tied: whether embeddings are tied where the config does not say. bidirectional: which
    tokens of a prompt attend to each other; None: none, attention is causal. models: their well-known names. videos:
    whether it takes them, too.
    """

    architecture: str
    text_type: str
    build: Callable[..., Vision]
    image_token_id: int | None
    names: Names = ()
    text_fields: Callable[[Config], Config] = lambda config: {}
    reads: bool = False
    section: str | None = None
    tied: bool = False
    bidirectional: Bidirectional | None = None
    models: str = ""
    videos: bool = False

    def text_config(self, config: Config) -> Config:
        """The language model's part of a config, which some keep beside the rest. Raises ModelLoadError for none."""
        nested = config.get("text_config")
        if nested is None:
            nested = config if "hidden_size" in config else {}
        if not isinstance(nested, Mapping):
            raise ModelLoadError("config.json: text_config is not an object")
        own_type = nested.get("model_type") if nested is not config else None
        return {**nested, **self.text_fields(config), "model_type": own_type or self.text_type}

    def placeholder(self, config: Config) -> int | None:
        """The token that stands for an image, if one does. Raises ModelLoadError for one that is none."""
        if self.image_token_id is None:
            return None
        token_id = config.get("image_token_index", config.get("image_token_id", self.image_token_id))
        if self.section == "visual" and "image_start_id" in config["visual"]:
            # What lies between the tokens for an image's beginning and its end.
            token_id = config["visual"]["image_start_id"] + 2
        if not isinstance(token_id, int):
            raise ModelLoadError(f"config.json: image_token_index is {token_id!r}, not a token id")
        return token_id


def _llava(config: Config, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> Vision:
    pixtral = (config.get("vision_config") or {}).get("model_type") == "pixtral"
    vision = (PixtralVision if pixtral else LlavaVision)(config, hidden_size, dtype=dtype, device=device)
    return Vision(vision, dict(vision.named_children()))


def _mistral3(config: Config, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> Vision:
    text = VISION_FAMILIES["mistral3"].text_config(config)
    eps = {**decoder_family(text).defaults, **text}["rms_norm_eps"]
    vision = PixtralVision(config, hidden_size, norm_eps=eps, dtype=dtype, device=device)
    return Vision(vision, dict(vision.named_children()))


def _llava_next(config: Config, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> Vision:
    vision = LlavaNextVision(config, hidden_size, dtype=dtype, device=device)
    return Vision(vision, dict(vision.named_children()))


def _idefics3(config: Config, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> Vision:
    vision = Idefics3Vision(config, hidden_size, dtype=dtype, device=device)
    return Vision(vision, dict(vision.named_children()))


def _qwen(config: Config, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> Vision:
    spec = QwenVisionSpec.from_config(config.get("vision_config") or {}, hidden_size)
    tower = QwenVisionTower(spec, dtype=dtype, device=device)
    return Vision(tower, {"visual": tower})


def _qwen3_text(config: Config) -> Config:
    return {"deepstack": len(deepstack_layers(config.get("vision_config") or {}))}


# As the towers before it call them.
_QWEN3_NAMES: Names = (
    (r"(visual\.blocks\.\d+\.mlp)\.linear_fc", r"\1.fc"),
    (r"(visual\.(?:merger|deepstack_merger_list\.\d+))\.norm\.", r"\1.ln_q."),
    (r"(visual\.(?:merger|deepstack_merger_list\.\d+))\.linear_fc1\.", r"\1.mlp.0."),
    (r"(visual\.(?:merger|deepstack_merger_list\.\d+))\.linear_fc2\.", r"\1.mlp.2."),
)


# What follows the tower's layers belongs to its merger here.
_GLM_OCR_NAMES: Names = ((r"visual\.(downsample|post_layernorm)\.", r"visual.merger.\1."),)


# As Qwen's towers call them. PaddleOCR-VL's has a head and another table of positions that nothing uses.
_PADDLEOCR_NAMES: Names = (
    (r"^(mlp_AR|model\.projector)\.", "visual.merger."),
    (r"^visual\.merger\.pre_norm\.", "visual.merger.ln_q."),
    (r"^visual\.merger\.linear_1\.", "visual.merger.mlp.0."),
    (r"^visual\.merger\.linear_2\.", "visual.merger.mlp.2."),
    (r"^(model\.)?visual\.vision_model\.", "visual."),
    (r"^visual\.embeddings\.patch_embedding\.", "visual.patch_embed.proj."),
    (r"^visual\.embeddings\.position_embedding\.", "visual.pos_embed."),
    (r"^visual\.post_layernorm\.", "visual.merger.post_layernorm."),
    (r"^visual\.encoder\.layers\.(\d+)\.layer_norm", r"visual.blocks.\1.norm"),
    (r"^visual\.encoder\.layers\.(\d+)\.self_attn\.out_proj\.", r"visual.blocks.\1.attn.proj."),
    (r"^visual\.encoder\.layers\.(\d+)\.self_attn\.", r"visual.blocks.\1.attn."),
    (r"^visual\.encoder\.layers\.", "visual.blocks."),
)


def _internvl(config: Config, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> Vision:
    vision = InternVision(config, hidden_size, dtype=dtype, device=device)
    return Vision(vision, dict(vision.named_children()))


# As CLIP's towers call them.
_INTERNVL_NAMES: Names = (
    (r"(vision_tower\.embeddings\.patch_embedding)s\.projection\.", r"\1."),
    (r"(vision_tower\.encoder\.layer)\.(\d+)\.", r"\1s.\2."),
    (r"(vision_tower\.encoder\.layers\.\d+)\.attention\.", r"\1.self_attn."),
    (r"(vision_tower\.encoder\.layers\.\d+\.self_attn)\.projection_layer\.", r"\1.out_proj."),
    (r"(vision_tower\.encoder\.layers\.\d+)\.self_attn\.([qk]_norm\.)", r"\1.\2"),
    (r"(vision_tower\.encoder\.layers\.\d+)\.layernorm_before\.", r"\1.layer_norm1."),
    (r"(vision_tower\.encoder\.layers\.\d+)\.layernorm_after\.", r"\1.layer_norm2."),
)


def _qwen_vl(config: Config, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> Vision:
    tower = ResampledVision(ResampledSpec.from_config(config["visual"], hidden_size), dtype=dtype, device=device)
    return Vision(tower, {"visual": tower})


def _gemma3(config: Config, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> Vision:
    vision = Gemma3Vision(config, hidden_size, dtype=dtype, device=device)
    return Vision(vision, dict(vision.named_children()))


def _blip(config: Config, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> Vision:
    tower = BlipTower(blip_vision_spec(config.get("vision_config") or {}), dtype=dtype, device=device)
    return Vision(tower, {"vision_tower": tower})


def _blip_text(config: Config) -> Config:
    text = config.get("text_config") or {}
    width = blip_vision_spec(config.get("vision_config") or {}).hidden_size
    return {"encoder_hidden_size": width, "tie_word_embeddings": text.get("tie_word_embeddings", True)}


_BLIP_NAMES: Names = (
    (r"^text_decoder\.(bert\.)?", "language_model."),
    (r"^vision_model\.", "vision_tower."),
    (r"^(vision_tower\..*\.self_attn)\.qkv\.", r"\1.qkv_proj."),
    (r"^(vision_tower\..*\.self_attn)\.projection\.", r"\1.out_proj."),
)


def _moondream(config: Config, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> Vision:
    tower = MoondreamTower(MoondreamSpec.from_config(config, hidden_size), dtype=dtype, device=device)
    return Vision(tower, {"vision_tower": tower})


# As the model's own code calls them, and as decoders here do.
_MOONDREAM_FIELDS = {
    "dim": "hidden_size",
    "ff_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "vocab_size": "vocab_size",
    "max_context": "max_position_embeddings",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
}


def _moondream_text(config: Config) -> Config:
    own = config.get("config") or {}
    text = own.get("text") or {}
    fields = {ours: text[theirs] for theirs, ours in _MOONDREAM_FIELDS.items() if theirs in text}
    return {**fields, "eos_token_id": (own.get("tokenizer") or {}).get("eos_id", 50256)}


_MOONDREAM_NAMES: Names = (
    (r"^(model\.)?text\.", "language_model."),
    (r"^(model\.)?vision\.", "vision_tower."),
    (r"^vision_tower\.patch_emb\.", "vision_tower.patch_embedding."),
    (r"^vision_tower\.pos_emb$", "vision_tower.position_embedding"),
    (r"^vision_tower\.post_ln\.", "vision_tower.post_layernorm."),
    (r"^vision_tower\.proj_mlp\.fc", "vision_tower.projector.linear_"),
    (r"^(vision_tower\.blocks\.\d+)\.ln([12])\.", r"\1.layer_norm\2."),
    (r"^(vision_tower\.blocks\.\d+)\.attn\.qkv\.", r"\1.self_attn.qkv_proj."),
    (r"^(vision_tower\.blocks\.\d+)\.attn\.proj\.", r"\1.self_attn.out_proj."),
)

VISION_FAMILIES: dict[str, VisionFamily] = {
    "llava": VisionFamily(
        "LlavaForConditionalGeneration", "llama", _llava, IMAGE_TOKEN_ID, models="LLaVA 1.5, Pixtral 12B, pixie"
    ),
    "llava_next": VisionFamily(
        "LlavaNextForConditionalGeneration", "llama", _llava_next, IMAGE_TOKEN_ID, models="LLaVA 1.6 (Vicuna, Mistral)"
    ),
    "idefics3": VisionFamily(
        "Idefics3ForConditionalGeneration", "llama", _idefics3, IDEFICS3_IMAGE_TOKEN_ID, models="Idefics 3, SmolVLM 1"
    ),
    "smolvlm": VisionFamily(
        "SmolVLMForConditionalGeneration",
        "llama",
        _idefics3,
        IDEFICS3_IMAGE_TOKEN_ID,
        models="SmolVLM 1 and 2",
        videos=True,
    ),
    "qwen_vl": VisionFamily(
        "QWenLMHeadModel", "qwen", _qwen_vl, 151859, section="visual", models="Qwen-VL, Qwen-VL-Chat"
    ),
    "gemma3": VisionFamily(
        "Gemma3ForConditionalGeneration",
        "gemma3_text",
        _gemma3,
        GEMMA3_IMAGE_TOKEN_ID,
        tied=True,
        bidirectional="images",
        models="Gemma 3 4B and larger",
    ),
    "qwen2_vl": VisionFamily(
        "Qwen2VLForConditionalGeneration", "qwen2_vl_text", _qwen, 151655, models="Qwen2-VL", videos=True
    ),
    "qwen2_5_vl": VisionFamily(
        "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", _qwen, 151655, models="Qwen2.5-VL", videos=True
    ),
    "qwen3_vl": VisionFamily(
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl_text",
        _qwen,
        151655,
        _QWEN3_NAMES,
        _qwen3_text,
        models="Qwen3-VL 2B to 32B",
        videos=True,
    ),
    "glm_ocr": VisionFamily(
        "GlmOcrForConditionalGeneration", "glm_ocr_text", _qwen, 59280, _GLM_OCR_NAMES, models="GLM-OCR", videos=True
    ),
    "paddleocr_vl": VisionFamily(
        "PaddleOCRVLForConditionalGeneration",
        "paddleocr_vl_text",
        _qwen,
        100295,
        _PADDLEOCR_NAMES,
        tied=True,
        models="PaddleOCR-VL",
    ),
    "internvl": VisionFamily(
        "InternVLForConditionalGeneration",
        "qwen2",
        _internvl,
        INTERNVL_IMAGE_TOKEN_ID,
        _INTERNVL_NAMES,
        tied=True,
        models="InternVL 3 and 3.5 (-hf)",
    ),
    "mistral3": VisionFamily(
        "Mistral3ForConditionalGeneration",
        "mistral",
        _mistral3,
        PIXTRAL_IMAGE_TOKEN_ID,
        tied=True,
        models="Mistral Small 3.1 and 3.2, Ministral 3",
    ),
    "moondream1": VisionFamily(
        "HfMoondream",
        "moondream_text",
        _moondream,
        None,
        _MOONDREAM_NAMES,
        _moondream_text,
        bidirectional="prefix",
        models="Moondream 2 of early 2025",
    ),
    "blip": VisionFamily(
        "BlipForConditionalGeneration",
        "blip_text_model",
        _blip,
        None,
        _BLIP_NAMES,
        _blip_text,
        models="BLIP captioning",
    ),
    # Its model type is blip as well.
    "blip_vqa": VisionFamily(
        "BlipForQuestionAnswering",
        "blip_text_model",
        _blip,
        None,
        _BLIP_NAMES,
        _blip_text,
        reads=True,
        models="BLIP question answering",
    ),
}
