"""LLaVA (https://arxiv.org/abs/2304.08485, https://arxiv.org/abs/2310.03744) and LLaVA-NeXT
(https://arxiv.org/abs/2407.07895)."""

from __future__ import annotations

from vlmserve.errors import ModelLoadError
from vlmserve.families.family import NamedModel, VisionFamily, vision_section
from vlmserve.families.gguf import Clip, GGUFTower, clip_names, clip_sizes
from vlmserve.families.spec import Config

VISION: Config = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
"""LLaVA-1.5's tower, which its published configs leave out."""
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role != 'system' %}{{ message.role | upper }}: {% endif %}"
    "{% for part in message.content %}{% if part.type == 'image' %}{{ image_token + '\n' }}{% endif %}{% endfor %}"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }} {% endif %}{% endfor %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


def _vision_config(config: Config) -> Config:
    return vision_section(config) or VISION


def _template(config: Config, generation_config: Config) -> str:
    return TEMPLATE


def _vision(clip: Clip) -> Config:
    gelu = clip.header.values.get("clip.use_gelu", False)
    return {**clip_sizes(clip), "model_type": "clip_vision_model", "hidden_act": "gelu" if gelu else "quick_gelu"}


def _more(clip: Clip) -> Config:
    """Without ``feature_layer``, the file ends at the selected layer."""
    config = {"vision_feature_layer": clip.array("feature_layer") or -1, "vision_feature_select_strategy": "default"}
    return {**config, "model_type": "llava_next", **_resolutions(clip)} if _cuts_images(clip) else config


def _image_processor(clip: Clip) -> Config:
    size = clip["image_size"]
    crop = {"height": size, "width": size}
    settings = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": size}, "crop_size": crop}
    if not _cuts_images(clip):
        return settings
    return {**settings, "image_processor_type": "LlavaNextImageProcessor", **_resolutions(clip)}


def _cuts_images(clip: Clip) -> bool:
    """True for LLaVA 1.6."""
    return bool(clip.get("mm_patch_merge_type") == "spatial_unpad")


def _resolutions(clip: Clip) -> Config:
    """Pairs of height and width; in the file, each width precedes its height."""
    edges = clip.array("image_grid_pinpoints")
    if not edges or len(edges) % 2:
        raise ModelLoadError(
            f"{clip.header.path}: clip.vision.image_grid_pinpoints is not a list of widths and heights"
        )
    return {"image_grid_pinpoints": [[height, width] for width, height in zip(edges[::2], edges[1::2], strict=True)]}


_TOWER = GGUFTower(
    vision=_vision,
    settings=_image_processor,
    names=(
        *clip_names("vision_tower"),
        (r"mm\.0\.(\w+)", r"multi_modal_projector.linear_1.\1"),
        (r"mm\.2\.(\w+)", r"multi_modal_projector.linear_2.\1"),
        (r"(model|v)\.image_newline", "image_newline"),
    ),
    output="mm.2.weight",
    more=_more,
    else_unknown=True,
)

FAMILIES = (
    VisionFamily(
        model_type="llava",
        architecture="LlavaForConditionalGeneration",
        text_type="llama",
        tower="vlmserve.models.vision.llava:LlavaVision",
        vision_config=_vision_config,
        image_token_id=32000,
        chat_template=_template,
        gguf={"mlp": _TOWER},
        models="LLaVA 1.5, pixie",
        short_names=(
            NamedModel("llava-1.5:7b", "llava-hf/llava-1.5-7b-hf", 7063427072, 131334144, 455821312),
            NamedModel("llava-1.5:13b", "llava-hf/llava-1.5-13b-hf", 13351494656, 164167680, 499142656),
        ),
    ),
    VisionFamily(
        model_type="llava_next",
        architecture="LlavaNextForConditionalGeneration",
        text_type="llama",
        tower="vlmserve.models.vision.llava:LlavaNextVision",
        image_processor="vlmserve.media.tiles:AnyResolutionProcessor.from_files",
        image_processor_types=("LlavaNextImageProcessor",),
        vision_config=_vision_config,
        image_token_id=32000,
        chat_template=_template,
        models="LLaVA 1.6 (Vicuna, Mistral), E5-V",
        short_names=(NamedModel("e5-v:8b", "royokong/e5-v", 8355276800, 525598720, 850089984),),
    ),
)
