"""Granite Docling of 2026: Granite's decoder, whose first layers also take features of tower layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from vlmserve.families.family import LanguageFamily, NamedModel, VisionFamily, vision_section
from vlmserve.families.llama import LLAMA
from vlmserve.families.qwen3_vl import with_deepstack
from vlmserve.families.spec import ArchSpec, Config, NormSpec, usual_spec

_TEXT: Config = {
    **LLAMA,
    "vocab_size": 133800,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "embedding_multiplier": 12.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.263,
    "attention_multiplier": 0.015625,
    "deepstack": 0,
    "eos_token_id": 100257,
}


class Scales(NamedTuple):
    """Factors of a residual stream that is divided by ``residual_multiplier``, which blocks then need not apply."""

    embeddings: float
    features: float
    """Image features that are added between layers."""

    @classmethod
    def of(cls, config: Config) -> Scales:
        """config: of the decoder, or config.json."""
        text = config.get("text_config", config)
        values = {**_TEXT, **(text if isinstance(text, Mapping) else {})}
        features = 1 / values["residual_multiplier"]
        return cls(values["embedding_multiplier"] * features, features)


def _granite(config: Config) -> ArchSpec:
    scales, bias = Scales.of(config), config["attention_bias"]
    spec = usual_spec(
        config,
        norm=NormSpec(config["rms_norm_eps"] * scales.features**2),
        embedding_scale=scales.embeddings,
        rounds_embedding_scale=False,
        scale=config["attention_multiplier"],
        logit_scale=1 / config["logits_scaling"],
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config["mlp_bias"],
    )
    return with_deepstack(spec, config["deepstack"])


def deepstack_layers(vision_config: Config) -> tuple[int, ...]:
    """As in Qwen3-VL."""
    return tuple(sorted(vision_config.get("deepstack_visual_indexes") or (3, 7, 10)))


FAMILIES = (
    LanguageFamily(model_type="granite_docling_text", defaults=_TEXT, build=_granite),
    VisionFamily(
        model_type="granite_docling",
        architecture="GraniteDoclingForConditionalGeneration",
        text_type="granite_docling_text",
        text_fields=lambda config: {"deepstack": len(deepstack_layers(vision_section(config)))},
        tied=True,
        names=((r"^(model\.)?vision_model\.connector\.", "connector."),),
        tower="vlmserve.models.vision.granite_docling:GraniteDoclingVision",
        image_processor="vlmserve.media.docling:DoclingProcessor.from_files",
        image_processor_types=("GraniteDocling",),
        image_token_id=100337,
        models="Granite Docling of 2026",
        short_names=(
            NamedModel("granite-docling:500m", "ibm-granite/granite-for-docling-500m", 543428352, 137011200, 156797696),
        ),
    ),
)
