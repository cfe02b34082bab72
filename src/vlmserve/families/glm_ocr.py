"""GLM-OCR: GLM-4's layers with M-RoPE, and a tower like Qwen2.5-VL's."""

from __future__ import annotations

from vlmserve.families.family import LanguageFamily, NamedModel, VisionFamily
from vlmserve.families.gguf import Clip, GGUFTower
from vlmserve.families.glm import GLM4_NAMES
from vlmserve.families.llama import LLAMA
from vlmserve.families.qwen2_vl import QWEN_TOWER, qwen_images, qwen_mlp, qwen_names, qwen_sizes
from vlmserve.families.spec import ArchSpec, Config, Names, usual_spec, with_sections

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


_GGUF_NAMES: Names = (
    (r"v\.patch_embd\.bias", "visual.patch_embed.proj.bias"),
    (r"v\.blk\.(\d+)\.attn_([qk])_norm\.weight", r"visual.blocks.\1.attn.\2_norm.weight"),
    (r"v\.post_ln\.weight", "visual.post_layernorm.weight"),
    (r"mm\.patch_merger\.(\w+)", r"visual.downsample.\1"),
    (r"mm\.model\.fc\.weight", "visual.merger.proj.weight"),
    (r"mm\.post_norm\.(\w+)", r"visual.merger.post_projection_norm.\1"),
    (r"mm\.(gate|up|down)\.weight", r"visual.merger.\1_proj.weight"),
)
_GGUF_TOKENS = {
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


def _vision(clip: Clip) -> Config:
    return {
        **qwen_sizes(clip),
        "model_type": "glm_ocr_vision",
        "hidden_size": clip["embedding_length"],
        "intermediate_size": clip.intermediate_size,
        "out_hidden_size": clip.tensor("mm.down.weight").shape[0],
        "hidden_act": "gelu" if clip.header.values.get("clip.use_gelu") else "silu",
        "attention_bias": clip.has("v.blk.0.attn_out.bias"),
        "rms_norm_eps": clip["attention.layer_norm_epsilon"],
    }


def _image_processor(clip: Clip) -> Config:
    """The bounds count an image twice, like a video of two frames."""
    own = dict(qwen_images(112 * 112 // 2, 28 * 28 * 6144)(clip))
    bounds = {"shortest_edge": 2 * own.pop("min_pixels"), "longest_edge": 2 * own.pop("max_pixels")}
    return {**own, "image_processor_type": "Glm46VImageProcessor", "size": bounds}


_TOWER = GGUFTower(
    vision=_vision,
    settings=_image_processor,
    names=qwen_names(*qwen_mlp("up_proj", "down_proj", "gate_proj"), *_GGUF_NAMES),
    output="mm.down.weight",
    text_types={"glm4": "glm_ocr_text"},
    tokens=_GGUF_TOKENS,
    swaps=False,
)

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
        gguf={"glm4v": _TOWER},
        models="GLM-OCR",
        short_names=(NamedModel("glm-ocr:0.9b", "zai-org/GLM-OCR", 1107405824, 91226112, 525346304),),
    ),
)
