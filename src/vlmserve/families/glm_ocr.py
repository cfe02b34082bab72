"""GLM-OCR: GLM-4's layers with M-RoPE, and a tower like Qwen2.5-VL's."""

from __future__ import annotations

from vlmserve.families.family import LanguageFamily, VisionFamily
from vlmserve.families.glm import GLM4_NAMES
from vlmserve.families.llama import LLAMA
from vlmserve.families.qwen2_vl import QWEN_TOWER
from vlmserve.families.spec import ArchSpec, Config, usual_spec, with_sections

_TEXT: Config = {
    **LLAMA,
    "vocab_size": 59392,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "eos_token_id": None,
}


def _glm_ocr(config: Config) -> ArchSpec:
    return usual_spec(with_sections(config, [8, 12, 12]), interleaved=True, norms="sandwich")


FAMILIES = (
    LanguageFamily(model_type="glm_ocr_text", defaults=_TEXT, build=_glm_ocr, names=GLM4_NAMES),
    VisionFamily(
        model_type="glm_ocr",
        architecture="GlmOcrForConditionalGeneration",
        text_type="glm_ocr_text",
        # Layers after the tower belong to its merger here.
        names=((r"visual\.(downsample|post_layernorm)\.", r"visual.merger.\1."),),
        **QWEN_TOWER,
        image_processor_types=("Glm4", "GlmOcr"),
        image_token_id=59280,
        video_token_id=59281,
        videos=True,
        frame_ends={"image_start_token_id": 59256, "image_end_token_id": 59257},
        frames_are_images=True,
        models="GLM-OCR",
    ),
)
