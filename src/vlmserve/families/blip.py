"""BLIP (https://arxiv.org/abs/2201.12086): a BERT decoder with cross-attention to the image."""

from __future__ import annotations

from typing import Any, Final

from vlmserve.families.family import LanguageFamily, VisionFamily, vision_section
from vlmserve.families.spec import GPT, ArchSpec, Config, Names, NormSpec, usual_spec

_TEXT: Config = {
    "vocab_size": 30524,
    "hidden_size": 768,
    "encoder_hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "tie_word_embeddings": True,
    "sep_token_id": 102,
}
_TEXT_NAMES: Names = (
    (r"^encoder\.layer\.", "layers."),
    (r"^embeddings\.word_embeddings\.", "embed_tokens."),
    (r"^embeddings\.position_embeddings\.", "position_embeddings."),
    (r"^embeddings\.LayerNorm\.", "embedding_norm."),
    (r"^cls\.predictions\.transform\.LayerNorm\.", "head_transform.norm."),
    (r"^cls\.predictions\.transform\.", "head_transform."),
    # Checkpoints hold the bias twice.
    (r"^cls\.predictions\.decoder\.weight$", "lm_head.weight"),
    (r"^cls\.predictions\.bias$", "lm_head.bias"),
    (r"\.crossattention\.self\.query\.", ".cross_attn.q_proj."),
    (r"\.crossattention\.self\.key\.", ".cross_attn.k_proj."),
    (r"\.crossattention\.self\.value\.", ".cross_attn.v_proj."),
    (r"\.crossattention\.output\.dense\.", ".cross_attn.o_proj."),
    (r"\.crossattention\.output\.LayerNorm\.", ".cross_output_norm."),
    (r"\.attention\.self\.query\.", ".self_attn.q_proj."),
    (r"\.attention\.self\.key\.", ".self_attn.k_proj."),
    (r"\.attention\.self\.value\.", ".self_attn.v_proj."),
    (r"\.attention\.output\.dense\.", ".self_attn.o_proj."),
    (r"\.attention\.output\.LayerNorm\.", ".attention_output_norm."),
    (r"\.intermediate\.dense\.", ".mlp.up_proj."),
    (r"\.output\.dense\.", ".mlp.down_proj."),
    (r"\.output\.LayerNorm\.", ".mlp_output_norm."),
)
_NAMES: Names = (
    (r"^text_decoder\.(bert\.)?", "language_model."),
    (r"^vision_model\.", "vision_tower."),
    (r"^(vision_tower\..*\.self_attn)\.qkv\.", r"\1.qkv_proj."),
    (r"^(vision_tower\..*\.self_attn)\.projection\.", r"\1.out_proj."),
)


def _bert_decoder(config: Config) -> ArchSpec:
    layers, positions = config["num_hidden_layers"], config["max_position_embeddings"]
    return usual_spec(
        config,
        norm=NormSpec(config["layer_norm_eps"], layer=True),
        norms="post",
        ropes=[None] * layers,
        learned_positions=positions,
        embedding_norm=True,
        **GPT,
        head_transform=True,
        head_bias=True,
        cross_size=config["encoder_hidden_size"],
    )


def _text_fields(config: Config) -> Config:
    text = config.get("text_config") or {}
    width = vision_section(config).get("hidden_size", 768)
    return {"encoder_hidden_size": width, "tie_word_embeddings": text.get("tie_word_embeddings", True)}


_BLIP: Final[dict[str, Any]] = {
    "model_type": "blip",
    "text_type": "blip_text_model",
    "text_fields": _text_fields,
    "names": _NAMES,
    "tower": "vlmserve.models.vision.blip:BlipVision",
    "vision_config": lambda config: {"model_type": "blip_vision_model", **vision_section(config)},
    "image_token_id": None,
}

FAMILIES = (
    LanguageFamily(
        model_type="blip_text_model", defaults=_TEXT, build=_bert_decoder, names=_TEXT_NAMES, end_token="sep_token_id"
    ),
    VisionFamily(
        architecture="BlipForConditionalGeneration",
        **_BLIP,
        prompts="vlmserve.prompt.one_image:blip_captions",
        models="BLIP captioning",
    ),
    VisionFamily(
        name="blip_vqa",
        architecture="BlipForQuestionAnswering",
        **_BLIP,
        reads_question=True,
        prompts="vlmserve.prompt.one_image:blip_questions",
        models="BLIP question answering",
    ),
)
