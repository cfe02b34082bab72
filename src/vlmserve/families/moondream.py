"""Moondream 2 of early 2025."""

from __future__ import annotations

from vlmserve.families.family import LanguageFamily, VisionFamily
from vlmserve.families.llama import LLAMA
from vlmserve.families.phi import PHI_MLP_NAMES
from vlmserve.families.spec import GPT, ArchSpec, Config, Names, NormSpec, usual_spec

_TEXT: Config = {
    **LLAMA,
    "vocab_size": 51200,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 2048,
    "eos_token_id": 50256,
}
_TEXT_NAMES: Names = (
    (r"^wte$", "embed_tokens.weight"),
    (r"^post_ln\.", "norm."),
    (r"^blocks\.", "layers."),
    (r"\.ln\.", ".attention_norm."),
    (r"\.attn\.qkv\.", ".self_attn.qkv_proj."),
    (r"\.attn\.proj\.", ".self_attn.o_proj."),
    *PHI_MLP_NAMES,
)
_TEXT_FIELDS = {
    "dim": "hidden_size",
    "ff_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "vocab_size": "vocab_size",
    "max_context": "max_position_embeddings",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
}
_NAMES: Names = (
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


def _moondream(config: Config) -> ArchSpec:
    return usual_spec(config, norm=NormSpec(1e-5, layer=True), rope_part=0.5, parallel=True, **GPT, head_bias=True)


def _text_fields(config: Config) -> Config:
    own = config.get("config") or {}
    text = own.get("text") or {}
    fields = {ours: text[theirs] for theirs, ours in _TEXT_FIELDS.items() if theirs in text}
    return {**fields, "eos_token_id": (own.get("tokenizer") or {}).get("eos_id", 50256)}


FAMILIES = (
    LanguageFamily(model_type="moondream_text", defaults=_TEXT, build=_moondream, names=_TEXT_NAMES),
    VisionFamily(
        model_type="moondream1",
        architecture="HfMoondream",
        text_type="moondream_text",
        text_fields=_text_fields,
        bidirectional="prefix",
        names=_NAMES,
        tower="vlmserve.models.vision.moondream:MoondreamTower.from_config",
        tower_name="vision_tower",
        image_processor="vlmserve.media.crops:CropProcessor.from_files",
        image_processor_types=("Moondream",),
        image_settings=lambda config: {"image_processor_type": "Moondream"},
        image_token_id=None,
        prompts="vlmserve.prompt.one_image:moondream",
        models="Moondream 2 of early 2025",
    ),
)
