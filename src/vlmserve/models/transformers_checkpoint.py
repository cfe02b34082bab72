from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from PIL import Image

from vlmserve.errors import MissingWeightsError, ModelLoadError, UnsupportedModelError
from vlmserve.media.images import DecodedImage
from vlmserve.media.transformers_processor import TransformersProcessor
from vlmserve.models.transformers_attention import NAME, NO_INTERFACE, attention_by_part, register_attention
from vlmserve.models.transformers_vision import TransformersVision
from vlmserve.types import KEY_BYTES, ImageInput

logger = logging.getLogger(__name__)

SAMPLE_SIZE = (60, 90)
"""Height and width of the image that is compared at load."""
EXTENDING_ROPES = ("dynamic", "longrope")
"""RoPE scalings that switch for a whole batch if one of its sequences is long."""
MISFITS = (ValueError, TypeError, AttributeError, LookupError)
"""Errors of code that gets a model it does not fit."""


@dataclass(frozen=True)
class Sample:
    """A preprocessed image to check a model with. token_types: of its placeholders, by name of the model's input."""

    image: ImageInput
    token_types: dict[str, int]
    image_token_id: int
    vision: TransformersVision


@dataclass(frozen=True)
class TransformersCheckpoint:
    """A folder as transformers reads it. Code in checkpoints never runs."""

    folder: Path

    @cached_property
    def config(self) -> Any:
        """Raises UnsupportedModelError for an unknown model."""
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        except (*MISFITS, OSError, ImportError, StrictDataclassError) as error:
            raise UnsupportedModelError(f"transformers does not know it either: {first_line(error)}") from error
        if getattr(config, "quantization_config", None) is not None:
            raise UnsupportedModelError("quantized checkpoints are only for vlmserve's own implementations")
        return config

    @property
    def max_position(self) -> int:
        text_config = self.config.get_text_config()
        longest = getattr(text_config, "max_position_embeddings", None)
        if not isinstance(longest, int):
            raise UnsupportedModelError("its config does not say how many positions it has (max_position_embeddings)")
        rope = getattr(text_config, "rope_parameters", None) or {}
        original = rope.get("original_max_position_embeddings") or getattr(
            text_config, "original_max_position_embeddings", None
        )
        if rope.get("rope_type") in EXTENDING_ROPES and isinstance(original, int) and original < longest:
            logger.info(
                "a context of %d instead of %d tokens: a longer request would change others in its batch",
                original,
                longest,
            )
            return original
        return longest

    @property
    def image_token_id(self) -> int | None:
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

        if type(self.config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            return None
        names = ("image_token_id", "image_token_index")
        found = next((value for name in names if isinstance(value := getattr(self.config, name, None), int)), None)
        if found is None:
            raise UnsupportedModelError("its config names no token that stands for images (image_token_id)")
        return found

    def module_names(self) -> list[str]:
        """Return names in transformers' order. Raises UnsupportedModelError for an unknown model."""
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        auto = AutoModelForCausalLM if self.image_token_id is None else AutoModelForImageTextToText
        try:
            with torch.device("meta"):
                return [name for name, _ in auto.from_config(self.config).named_modules()]
        except (*MISFITS, ImportError) as error:
            raise UnsupportedModelError(f"transformers does not make this model: {first_line(error)}") from error

    def sample(self, model: Any) -> Sample | None:
        if self.image_token_id is None:
            return None
        noise = np.random.default_rng(0).integers(0, 256, (*SAMPLE_SIZE, 3), np.uint8)
        processor = TransformersProcessor(self.folder, self.image_token_id)
        sample_image = DecodedImage.whole(Image.fromarray(noise))
        pixels, placeholders = processor.prepare(sample_image)
        image = ImageInput(bytes(KEY_BYTES), pixels, **placeholders._asdict())
        return Sample(image, processor.token_types(sample_image), self.image_token_id, TransformersVision(model))

    def load(self, dtype: torch.dtype, device: torch.device) -> Any:
        """Raises UnsupportedModelError, MissingWeightsError or ModelLoadError."""
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        register_attention()
        auto = AutoModelForCausalLM if self.image_token_id is None else AutoModelForImageTextToText
        try:
            model, report = auto.from_pretrained(
                self.folder, config=self.config, dtype=dtype, attn_implementation=attention_by_part(self.config),
                local_files_only=True, trust_remote_code=False, output_loading_info=True,
            )  # fmt: skip
        except (*MISFITS, ImportError) as error:
            # Some models have their own table of attention functions.
            named = isinstance(error, KeyError) and error.args == (NAME,)
            reason = NO_INTERFACE if named else f"transformers cannot load it as a language model: {first_line(error)}"
            raise UnsupportedModelError(reason) from error
        except (OSError, RuntimeError) as error:
            raise ModelLoadError(f"transformers cannot load {self.folder}: {first_line(error)}") from error
        if missing := sorted(report["missing_keys"]):
            raise MissingWeightsError(f"{self.folder} has no tensor {missing[0]}" + _and_more(len(missing) - 1))
        if not model._can_set_attn_implementation():
            raise UnsupportedModelError(NO_INTERFACE)
        return model.eval().requires_grad_(False).to(device)


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _and_more(count: int) -> str:
    return f", and {count} more are missing" if count else ""
