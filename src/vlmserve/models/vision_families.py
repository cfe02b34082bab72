"""The vision-language families: where each one's config has its parts, and what encodes its pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vlmserve.errors import ModelLoadError
from vlmserve.models.gemma3 import IMAGE_TOKEN_ID as GEMMA3_IMAGE_TOKEN_ID
from vlmserve.models.gemma3 import Gemma3Vision
from vlmserve.models.idefics3 import IMAGE_TOKEN_ID as IDEFICS3_IMAGE_TOKEN_ID
from vlmserve.models.idefics3 import Idefics3Vision
from vlmserve.models.llava import IMAGE_TOKEN_ID, LlavaNextVision, LlavaVision
from vlmserve.models.protocols import VisionEncoder
from vlmserve.models.vision.qwen import QwenVisionSpec, QwenVisionTower
from vlmserve.models.vision.resampled import ResampledSpec, ResampledVision

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Vision:
    """What encodes pictures, and its modules under the names that weights have."""

    encoder: VisionEncoder
    modules: Mapping[str, nn.Module]


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """A row of the table.

    architecture: as config.json names it. text_type: the model type of a language model whose config does not name its
    own. build: from the whole config and the decoder's width. image_token_id: the placeholder of a config that names
    none. section: of the config, without which a checkpoint of the architecture does not see. tied: whether embeddings
    are tied where the config does not say. whole_pictures: see `AttentionSpec`.
    """

    architecture: str
    text_type: str
    build: Callable[..., Vision]
    image_token_id: int
    section: str | None = None
    tied: bool = False
    whole_pictures: bool = False

    def text_config(self, config: Config) -> Config:
        """The language model's part of a config, which some keep beside the rest. Raises ModelLoadError for none."""
        nested = config.get("text_config")
        if nested is None:
            nested = config if "hidden_size" in config else {}
        if not isinstance(nested, Mapping):
            raise ModelLoadError("config.json: text_config is not an object")
        own_type = nested.get("model_type") if nested is not config else None
        return {**nested, "model_type": own_type or self.text_type}

    def placeholder(self, config: Config) -> int:
        """The token that stands for a picture. Raises ModelLoadError for one that is none."""
        token_id = config.get("image_token_index", config.get("image_token_id", self.image_token_id))
        if self.section == "visual" and "image_start_id" in config["visual"]:
            # What lies between the tokens for a picture's beginning and its end.
            token_id = config["visual"]["image_start_id"] + 2
        if not isinstance(token_id, int):
            raise ModelLoadError(f"config.json: image_token_index is {token_id!r}, not a token id")
        return token_id


def _llava(config: Config, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> Vision:
    vision = LlavaVision(config, hidden_size, dtype=dtype, device=device)
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


def _qwen_vl(config: Config, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> Vision:
    tower = ResampledVision(ResampledSpec.from_config(config["visual"], hidden_size), dtype=dtype, device=device)
    return Vision(tower, {"visual": tower})


def _gemma3(config: Config, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> Vision:
    vision = Gemma3Vision(config, hidden_size, dtype=dtype, device=device)
    return Vision(vision, dict(vision.named_children()))


VISION_FAMILIES: dict[str, VisionFamily] = {
    "llava": VisionFamily("LlavaForConditionalGeneration", "llama", _llava, IMAGE_TOKEN_ID),
    "llava_next": VisionFamily("LlavaNextForConditionalGeneration", "llama", _llava_next, IMAGE_TOKEN_ID),
    "idefics3": VisionFamily("Idefics3ForConditionalGeneration", "llama", _idefics3, IDEFICS3_IMAGE_TOKEN_ID),
    "smolvlm": VisionFamily("SmolVLMForConditionalGeneration", "llama", _idefics3, IDEFICS3_IMAGE_TOKEN_ID),
    "qwen_vl": VisionFamily("QWenLMHeadModel", "qwen", _qwen_vl, 151859, section="visual"),
    "gemma3": VisionFamily(
        "Gemma3ForConditionalGeneration",
        "gemma3_text",
        _gemma3,
        GEMMA3_IMAGE_TOKEN_ID,
        tied=True,
        whole_pictures=True,
    ),
    "qwen2_vl": VisionFamily("Qwen2VLForConditionalGeneration", "qwen2_vl_text", _qwen, 151655),
    "qwen2_5_vl": VisionFamily("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", _qwen, 151655),
}
