"""Gemma 3 (https://arxiv.org/abs/2503.19786)."""

from __future__ import annotations

from collections.abc import Sequence

from vlmserve.families.family import LanguageFamily, NamedModel, VisionFamily
from vlmserve.families.gemma import GEMMA2, SANDWICH_NAMES, gemma2, gemma2_traits
from vlmserve.families.gguf import Clip, GGUFText, GGUFTower, Metadata, clip_names, clip_scale, siglip_vision
from vlmserve.families.spec import ArchSpec, Config, HeadNormSpec, NormSpec, layer_windows
from vlmserve.layer_specs import RopeSpec

TOKENS_PER_IMAGE = 256
"""Default of ``mm_tokens_per_image``."""
_TEXT: Config = {
    **GEMMA2,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": None,
    "sliding_window_pattern": 6,
}


def _gemma3(config: Config) -> ArchSpec:
    windows = layer_windows(config, lambda layer: (layer + 1) % config["sliding_window_pattern"] != 0)
    head_norm = HeadNormSpec("head", NormSpec(config["rms_norm_eps"], offset=1.0))
    return gemma2(config, windows, ropes=_ropes(config, windows), head_norm=head_norm)


def _ropes(config: Config, windows: Sequence[int | None]) -> list[RopeSpec]:
    """Window layers have a smaller base and are not scaled."""
    by_kind = config.get("rope_parameters") or {}
    everywhere = by_kind.get("full_attention") or {"rope_theta": config["rope_theta"], **(config["rope_scaling"] or {})}
    nearby = by_kind.get("sliding_attention") or {"rope_theta": config["rope_local_base_freq"]}
    head_size, positions = config["head_dim"], config["max_position_embeddings"]
    full, sliding = (RopeSpec.from_config(head_size, 1e4, parameters, positions) for parameters in (everywhere, nearby))
    return [full if window is None else sliding for window in windows]


def _text_traits(metadata: Metadata) -> Config:
    layers, window = metadata["block_count"], metadata.get("attention.sliding_window")
    slides = metadata.array("attention.sliding_window_pattern")
    if not slides:
        every = metadata.get("attention.sliding_window_pattern", 6)
        slides = [(layer + 1) % every != 0 for layer in range(layers)]
    return {
        **gemma2_traits(metadata, largest=62),
        "layer_types": ["sliding_attention" if window and slide else "full_attention" for slide in slides],
        "rope_theta": metadata.get("rope.freq_base", 1e6),
        "rope_local_base_freq": metadata.get("rope.freq_base_swa", 1e4),
    }


def _image_processor(clip: Clip) -> Config:
    size = {"height": clip["image_size"], "width": clip["image_size"]}
    return {"image_processor_type": "Gemma3ImageProcessor", "size": size}


_TOWER = GGUFTower(
    vision=siglip_vision("siglip_vision_model"),
    settings=_image_processor,
    names=(
        *clip_names("vision_tower"),
        (r"mm\.input_projection\.weight", "multi_modal_projector.mm_input_projection_weight"),
        (r"mm\.soft_emb_norm\.weight", "multi_modal_projector.mm_soft_emb_norm.weight"),
    ),
    output="mm.input_projection.weight",
    axis=1,
    # Published checkpoints have the default number of embeddings, unless the file has a factor.
    more=lambda clip: {"mm_tokens_per_image": (clip["image_size"] // clip["patch_size"] // clip_scale(clip, 4)) ** 2},
    text_types={"gemma3": "gemma3_text"},
    tokens={
        "image_token_id": "<image_soft_token>",
        "boi_token_index": "<start_of_image>",
        "eoi_token_index": "<end_of_image>",
    },
    else_unknown=True,
    norm_offset=1.0,
)

FAMILIES = (
    LanguageFamily(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        defaults=_TEXT,
        build=_gemma3,
        names=SANDWICH_NAMES,
        gguf={"gemma3": GGUFText(_text_traits, norm_offset=1.0)},
        models="Gemma 3 1B",
        short_names=(NamedModel("gemma3:1b", "google/gemma-3-1b-it", 999885952, 301989888),),
    ),
    VisionFamily(
        model_type="gemma3",
        architecture="Gemma3ForConditionalGeneration",
        text_type="gemma3_text",
        tied=True,
        bidirectional="images",
        tower="vlmserve.models.vision.gemma3:Gemma3Vision",
        image_tokens=lambda config: config.get("mm_tokens_per_image", TOKENS_PER_IMAGE),
        image_token_id=262144,
        image_ends={"boi_token_index": 255999, "eoi_token_index": 256000},
        gguf={"gemma3": _TOWER},
        models="Gemma 3 4B and larger",
        short_names=(
            NamedModel("gemma3:4b", "google/gemma-3-4b-it", 4300079472, 671252480, 419816304),
            NamedModel("gemma3:12b", "google/gemma-3-12b-it", 12187325040, 1006878720, 421290864),
            NamedModel("gemma3:27b", "google/gemma-3-27b-it", 27432406640, 1409630208, 423060336),
        ),
    ),
)
