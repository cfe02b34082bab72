"""Reads what a checkpoint says about its prompts: special tokens, chat template, placeholder, end tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlmserve.gguf.pair import language_model
from vlmserve.prompt import gguf
from vlmserve.prompt.files import PromptFiles, read_json

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
DEFAULT_IMAGE_TOKEN_IDS = {
    "llava": 32000,
    "llava_next": 32000,
    "idefics3": 128257,
    "smolvlm": 128257,
    "qwen2_vl": 151655,
    "qwen2_5_vl": 151655,
    "qwen3_vl": 151655,
    "glm_ocr": 59280,
    "paddleocr_vl": 100295,
    "gemma3": 262144,
    "internvl": 151667,
    "mistral3": 10,
}
"""Placeholders of images, by model types whose config.json may leave them out."""
OWN_PREPROCESSING = DEFAULT_IMAGE_TOKEN_IDS.keys() | {"blip", "moondream1"}
"""Model types for whose images there is code of our own."""
DEFAULT_VIDEO_TOKEN_IDS = {"qwen2_vl": 151656, "qwen2_5_vl": 151656, "qwen3_vl": 151656, "glm_ocr": 59281}
"""Placeholders of videos, by the model types that take any."""
DEFAULT_IMAGE_ENDS = {"gemma3": (255999, 256000)}
"""The tokens before and after an image, by model types whose chat templates write the first alone for it."""
DEFAULT_FRAME_ENDS = {
    "qwen3_vl": {"vision_start_token_id": 151652, "vision_end_token_id": 151653},
    "glm_ocr": {"image_start_token_id": 59256, "image_end_token_id": 59257},
}
"""The tokens before and after each frame of a video, by model types that read the times of frames as text, and by what
config.json calls them."""
FRAMES_ARE_IMAGES = {"glm_ocr"}
"""Model types whose videos have images' tokens for their frames."""

LLAVA_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role != 'system' %}{{ message.role | upper }}: {% endif %}"
    "{% for part in message.content %}{% if part.type == 'image' %}{{ image_token + '\n' }}{% endif %}{% endfor %}"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }} {% endif %}{% endfor %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
"""LLaVA-1.5's conversation format, for its checkpoints that carry no template (https://arxiv.org/abs/2310.03744)."""


QWEN_TEMPLATE = (
    "{% set images = namespace(count=0) %}"
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}{% set images.count = images.count + 1 %}"
    "Picture {{ images.count }}: <img>{{ image_token }}</img>{{ '\n' }}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML with numbered images, of the first Qwen's and Qwen-VL's chat checkpoints (https://arxiv.org/abs/2308.12966),
whose own code writes it."""

PALIGEMMA_TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}{{ image_token }}{% endif %}"
    "{% endfor %}{% endfor %}{{ bos_token }}"
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{{ '\n' }}{% endif %}"
    "{% endfor %}{% endfor %}"
)
"""PaliGemma's only form of a question (https://arxiv.org/abs/2407.07726), which transformers' processor writes."""

CHATGLM3_TEMPLATE = (
    "[gMASK]sop{% for message in messages %}<|{{ message.role }}|>\n {{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""For ChatGLM3's first revisions, whose own code writes it."""


def read_prompt_files(folder: Path) -> PromptFiles:
    """Read what `folder`, or a GGUF file, has. Raises ModelLoadError if a file is not what it should be."""
    file = language_model(folder)
    of_file = None if file is None else gguf.read_prompt_files(file)
    if of_file is not None and file == folder:
        return of_file
    config = read_json(folder / "config.json")
    tokenizer_config = read_json(folder / "tokenizer_config.json")
    model_type = str(config.get("model_type", ""))
    special: Mapping[str, str] = _special_tokens(tokenizer_config, read_json(folder / "special_tokens_map.json"))
    visual = config.get("visual")
    takes_images = "vision_config" in config or isinstance(visual, dict) or model_type in DEFAULT_IMAGE_TOKEN_IDS
    default_id = DEFAULT_IMAGE_TOKEN_IDS.get(model_type)
    if isinstance(visual, dict):
        # What lies between the tokens for an image's beginning and its end.
        default_id = visual.get("image_start_id", 151857) + 2
    image_token_id = config.get("image_token_id", config.get("image_token_index", default_id)) if takes_images else None
    template, end_token_ids = _chat_template(folder, tokenizer_config), _end_token_ids(folder, config)
    if of_file is not None:
        special, template, end_token_ids = of_file.special_tokens, of_file.chat_template, of_file.end_token_ids
    ends = DEFAULT_IMAGE_ENDS.get(model_type)
    frame_ends = [config.get(name, usual) for name, usual in DEFAULT_FRAME_ENDS.get(model_type, {}).items()]
    return PromptFiles(
        model_type=model_type,
        tokenizer_config=tokenizer_config,
        special_tokens=special,
        image_token_id=image_token_id,
        chat_template=template or _built_in_template(folder, config),
        end_token_ids=end_token_ids,
        video_token_id=config.get("video_token_id", DEFAULT_VIDEO_TOKEN_IDS[model_type])
        if model_type in DEFAULT_VIDEO_TOKEN_IDS
        else None,
        image_ends=(config.get("boi_token_index", ends[0]), config.get("eoi_token_index", ends[1]))
        if ends is not None
        else None,
        frame_ends=(frame_ends[0], frame_ends[1]) if frame_ends else None,
        frames_are_images=model_type in FRAMES_ARE_IMAGES,
        has_own_preprocessing=model_type in OWN_PREPROCESSING or isinstance(visual, dict),
    )


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for source in sources:
        own = source.get("model_specific_special_tokens") or source.get("extra_special_tokens")
        named = {name: source.get(name) for name in SPECIAL_TOKEN_NAMES}
        for name, value in {**named, **(own if isinstance(own, dict) else {})}.items():
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                tokens.setdefault(name, content)
    return tokens


def _chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    template: Any = None
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8-sig")
    for source in (
        read_json(folder / "chat_template.json"),
        read_json(folder / "processor_config.json"),
        tokenizer_config,
    ):
        template = template or source.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None


def _built_in_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Of models whose chat checkpoints carry none."""
    model_type = config.get("model_type")
    if model_type in ("llava", "llava_next"):
        return LLAVA_TEMPLATE
    if model_type == "paligemma":
        return PALIGEMMA_TEMPLATE
    if model_type == "qwen" and read_json(folder / "generation_config.json").get("chat_format") == "chatml":
        return QWEN_TEMPLATE
    if model_type == "chatglm" and "chatglm3" in str(config.get("_name_or_path")):
        return CHATGLM3_TEMPLATE
    return None


def _end_token_ids(folder: Path, config: Mapping[str, Any]) -> frozenset[int]:
    sources = (read_json(folder / "generation_config.json"), config, config.get("text_config") or {})
    for source in sources:
        ids = source.get("eos_token_id")
        if isinstance(ids, int):
            return frozenset({ids})
        if isinstance(ids, list) and ids:
            return frozenset(ids)
    return frozenset()
