"""Checkpoints with the shapes of published vision-language models, fewer layers and random weights, before pixie's
tokenizer; and transformers' processors for them, loaded without torchvision."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tokenizers import AddedToken, Tokenizer

from vlmserve.models.hub import resolve_model

LAYERS, VISION_LAYERS = 4, 6
"""Of decoders and towers."""


@dataclass(frozen=True)
class RandomModel:
    """save: writes the checkpoint into a folder, for the ids of `tokens`. tokens: beside those of the tokenizer. image:
    how a chat template writes one. settings: files of processors by name. processor: transformers' own, of a folder and
    a tokenizer."""

    save: Callable[[Path, Mapping[str, int]], None]
    tokens: Sequence[str]
    image: str
    settings: Mapping[str, Any]
    processor: Callable[[Path, Any], Any]
    named: Mapping[str, str] | None = None

    def write(self, folder: Path) -> None:
        """All files of the checkpoint."""
        tokenizer = Tokenizer.from_file(str(resolve_model("pixie") / "tokenizer.json"))
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in self.tokens])
        tokenizer.save(str(folder / "tokenizer.json"))
        config: dict[str, Any] = {"tokenizer_class": "TokenizersBackend"}
        if self.named is not None:
            config["extra_special_tokens"] = dict(self.named)
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "chat_template.jinja").write_text(
            "{% for message in messages %}{% for part in message.content %}{% if part.type == 'image' %}"
            + self.image
            + "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
        )
        for name, content in self.settings.items():
            (folder / name).write_text(json.dumps(content))
        self.save(folder, {token: tokenizer.token_to_id(token) for token in self.tokens})


def load_processors(model: RandomModel) -> None:
    """Have transformers load this model's processor wherever it loads one."""
    from transformers import AutoProcessor, AutoTokenizer

    AutoProcessor.from_pretrained = lambda folder, **_: model.processor(folder, AutoTokenizer.from_pretrained(folder))


def _save(model_class: str, config: Any, folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    getattr(transformers, model_class)(config).to(torch.bfloat16).save_pretrained(folder)


def _without_videos(processor_class: type[Any]) -> type[Any]:
    """A processor that takes no part for videos."""

    class ImagesOnly(processor_class):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return argument and super().check_argument_for_proper_class(argument_name, argument)

    return ImagesOnly


def _qwen3_vl(folder: Path, ids: Mapping[str, int]) -> None:
    """Of Qwen3-VL-2B."""
    from transformers import Qwen3VLConfig

    config = Qwen3VLConfig(
        text_config={
            "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": LAYERS, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
        },
        vision_config={
            "depth": VISION_LAYERS, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16,
            "out_hidden_size": 2048, "deepstack_visual_indexes": [1, 3, 5],
        },
        tie_word_embeddings=True,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip
    _save("Qwen3VLForConditionalGeneration", config, folder)


def _qwen3_vl_processor(folder: Path, tokenizer: Any) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    images = Qwen2VLImageProcessorPil.from_pretrained(folder)
    return _without_videos(Qwen3VLProcessor)(images, tokenizer, chat_template=tokenizer.chat_template)


def _internvl(folder: Path, ids: Mapping[str, int]) -> None:
    """Of InternVL3.5-2B."""
    from transformers import InternVLConfig, InternVLVisionConfig, Qwen3Config

    config = InternVLConfig(
        text_config=Qwen3Config(
            hidden_size=2048, intermediate_size=6144, num_hidden_layers=LAYERS, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=32768,
            tie_word_embeddings=True,
        ),
        vision_config=InternVLVisionConfig(num_hidden_layers=VISION_LAYERS, attention_bias=True),
        tie_word_embeddings=True,
        image_token_id=ids["<IMG_CONTEXT>"],
    )  # fmt: skip
    _save("InternVLForConditionalGeneration", config, folder)


def _internvl_processor(folder: Path, tokenizer: Any) -> Any:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    from transformers.models.internvl.processing_internvl import InternVLProcessor

    images = GotOcr2ImageProcessorPil.from_pretrained(folder)
    return _without_videos(InternVLProcessor)(images, tokenizer, chat_template=tokenizer.chat_template)


def _ministral3(folder: Path, ids: Mapping[str, int]) -> None:
    """Of Ministral 3 3B."""
    from transformers import Ministral3Config, Mistral3Config, PixtralVisionConfig

    config = Mistral3Config(
        text_config=Ministral3Config(
            hidden_size=3072, intermediate_size=9216, num_hidden_layers=LAYERS, num_attention_heads=32,
            num_key_value_heads=8, head_dim=128, vocab_size=131072, tie_word_embeddings=True,
        ),
        vision_config=PixtralVisionConfig(
            num_hidden_layers=VISION_LAYERS, patch_size=14, image_size=1540, hidden_act="silu"
        ),
        tie_word_embeddings=True,
        image_token_index=ids["[IMG]"],
    )  # fmt: skip
    _save("Mistral3ForConditionalGeneration", config, folder)


def _pixtral_processor(folder: Path, tokenizer: Any) -> Any:
    from transformers.models.pixtral import image_processing_pil_pixtral

    # It takes a function from a module that needs torchvision; another one has it, too.
    replaced = {"transformers.models.pixtral.image_processing_pixtral": image_processing_pil_pixtral}
    with mock.patch.dict(sys.modules, replaced):
        module = importlib.import_module("transformers.models.pixtral.processing_pixtral")
    images = image_processing_pil_pixtral.PixtralImageProcessorPil.from_pretrained(folder)
    sizes = {"patch_size": 14, "spatial_merge_size": 2}
    return module.PixtralProcessor(images, tokenizer, chat_template=tokenizer.chat_template, **sizes)


def _glm_ocr(folder: Path, ids: Mapping[str, int]) -> None:
    """Of GLM-OCR."""
    from transformers import GlmOcrConfig

    config = GlmOcrConfig(
        text_config={
            "hidden_size": 1536, "intermediate_size": 4608, "num_hidden_layers": LAYERS, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 59392, "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 24, 24]},
        },
        vision_config={"depth": VISION_LAYERS},
        image_token_id=ids["<|image|>"],
        video_token_id=ids["<|video|>"],
        image_start_token_id=ids["<|begin_of_image|>"],
        image_end_token_id=ids["<|end_of_image|>"],
        video_start_token_id=ids["<|begin_of_video|>"],
        video_end_token_id=ids["<|end_of_video|>"],
    )  # fmt: skip
    _save("GlmOcrForConditionalGeneration", config, folder)


def _glm_ocr_processor(folder: Path, tokenizer: Any) -> Any:
    from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
    from transformers.models.glm46v.processing_glm46v import Glm46VProcessor

    images = Glm46VImageProcessorPil.from_pretrained(folder)
    return _without_videos(Glm46VProcessor)(images, tokenizer, chat_template=tokenizer.chat_template)


def _paddleocr(folder: Path, ids: Mapping[str, int]) -> None:
    """Of PaddleOCR-VL."""
    from transformers import PaddleOCRVLConfig

    config = PaddleOCRVLConfig(
        text_config={
            "num_hidden_layers": LAYERS, "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [16, 24, 24]},
        },
        vision_config={"num_hidden_layers": VISION_LAYERS},
        tie_word_embeddings=False,
        image_token_id=ids["<|IMAGE_PLACEHOLDER|>"],
        vision_start_token_id=ids["<|IMAGE_START|>"],
        vision_end_token_id=ids["<|IMAGE_END|>"],
    )  # fmt: skip
    _save("PaddleOCRVLForConditionalGeneration", config, folder)


def _paddleocr_processor(folder: Path, tokenizer: Any) -> Any:
    from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil
    from transformers.models.paddleocr_vl.processing_paddleocr_vl import PaddleOCRVLProcessor

    images = PaddleOCRVLImageProcessorPil.from_pretrained(folder)
    return PaddleOCRVLProcessor(images, tokenizer, chat_template=tokenizer.chat_template)


def _smolvlm2(folder: Path, ids: Mapping[str, int]) -> None:
    """SmolVLM2-500M, with all layers."""
    from transformers import LlamaConfig, SmolVLMConfig

    text = LlamaConfig(
        hidden_size=960, intermediate_size=2560, num_hidden_layers=32, num_attention_heads=15, num_key_value_heads=5,
        vocab_size=49280, max_position_embeddings=8192, tie_word_embeddings=True, rope_theta=1e5,
    )  # fmt: skip
    vision = {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "image_size": 512, "patch_size": 16,
    }  # fmt: skip
    config = SmolVLMConfig(
        text_config=text, vision_config=vision, image_token_id=ids["<image>"], scale_factor=4, tie_word_embeddings=True
    )
    _save("SmolVLMForConditionalGeneration", config, folder)


def _smolvlm2_processor(folder: Path, tokenizer: Any) -> Any:
    from transformers import Idefics3Processor
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    images = SmolVLMImageProcessorPil.from_pretrained(folder)
    return Idefics3Processor(images, tokenizer, image_seq_len=64, chat_template=tokenizer.chat_template)


RANDOM_MODELS = {
    "qwen3-vl": RandomModel(
        _qwen3_vl,
        ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        "<|vision_start|><|image_pad|><|vision_end|>",
        {
            "preprocessor_config.json": {
                "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "merge_size": 2,
                "size": {"shortest_edge": 65536, "longest_edge": 16777216}, "temporal_patch_size": 2,
                "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
            }
        },
        _qwen3_vl_processor,
    ),
    "internvl": RandomModel(
        _internvl,
        ("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        "<IMG_CONTEXT>",
        {
            "preprocessor_config.json": {
                "image_processor_type": "GotOcr2ImageProcessorFast", "size": {"height": 448, "width": 448},
                "max_patches": 6, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
            },
            "processor_config.json": {"image_seq_length": 256},
        },
        _internvl_processor,
        {
            "context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>",
            "video_token": "<video>",
        },
    ),
    "ministral3": RandomModel(
        _ministral3,
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        "[IMG]",
        {
            "preprocessor_config.json": {
                "image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 1540},
                "patch_size": {"height": 14, "width": 14},
            },
            "processor_config.json": {"patch_size": 14, "spatial_merge_size": 2},
        },
        _pixtral_processor,
    ),
    "glm-ocr": RandomModel(
        _glm_ocr,
        (
            "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>", "<|image|>", "<|video|>"
        ),
        "<|begin_of_image|><|image|><|end_of_image|>",
        {
            "preprocessor_config.json": {
                "image_processor_type": "Glm46VImageProcessor", "patch_size": 14, "merge_size": 2,
                "temporal_patch_size": 2, "size": {"shortest_edge": 12544, "longest_edge": 9633792},
            }
        },
        _glm_ocr_processor,
    ),
    "paddleocr-vl": RandomModel(
        _paddleocr,
        ("<|IMAGE_START|>", "<|IMAGE_END|>", "<|IMAGE_PLACEHOLDER|>"),
        "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        {
            "preprocessor_config.json": {
                "image_processor_type": "PaddleOCRVLImageProcessor", "patch_size": 14, "merge_size": 2,
                "temporal_patch_size": 1, "min_pixels": 147384, "max_pixels": 2822400, "image_mean": [0.5] * 3,
                "image_std": [0.5] * 3,
            }
        },
        _paddleocr_processor,
        {"image_token": "<|IMAGE_PLACEHOLDER|>"},
    ),
    "smolvlm2": RandomModel(
        _smolvlm2,
        (
            "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
            *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
        ),
        "<image>",
        {
            "preprocessor_config.json": {
                "image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 2048},
                "max_image_size": {"longest_edge": 512}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
            },
            "processor_config.json": {"processor_class": "SmolVLMProcessor", "image_seq_len": 64},
        },
        _smolvlm2_processor,
    ),
}  # fmt: skip
