"""The values that family modules declare."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vlmserve.errors import ModelLoadError
from vlmserve.families.gguf import GGUFText, GGUFTower
from vlmserve.families.spec import ArchSpec, Config, Names
from vlmserve.types import Bidirectional

FIXED_SIZE = "vlmserve.media.processor:FixedSizeProcessor.from_files"
"""The image processor for any ``image_processor_type`` that no family names."""
Template = Callable[[Config, Config], str | None]
"""The chat template for a config.json and a generation_config.json."""

BYTES = {"bfloat16": 2.0, "int8": 1.0, "int4": 0.625}
"""Bytes per weight. int4 has a 16-bit scale and a 16-bit minimum per 32 weights."""
KV_SHARE = 0.25
"""Fraction of free memory for the KV cache, images and everything else."""
_COMMON: Names = ((r"\.input_layernorm\.", ".attention_norm."), (r"\.post_attention_layernorm\.", ".mlp_norm."))


def rename(name: str, names: Names) -> str:
    for pattern, replacement in names:
        name = re.sub(pattern, replacement, name)
    return name


def vision_section(config: Config) -> Config:
    """Empty if there is none."""
    section = config.get("vision_config")
    return section if isinstance(section, Mapping) else {}


class NamedModel(NamedTuple):
    """A short name of a model on the Hugging Face hub, and the weights of its published checkpoint."""

    name: str
    repository: str
    """With weights in bfloat16."""
    parameters: int
    """All weights, tied ones once."""
    head: int
    """Weights of the output head, which has at least 8 bits."""
    kept: int = 0
    """16-bit weights even if quantized: tower, projector, and an embedding table that is not tied to the head."""

    @property
    def active(self) -> str:
        """Billions of active parameters per token, from the repository's name; empty without experts."""
        found = re.search(r"-A(\d+)B\b", self.repository)
        return found[1] if found else ""

    def memory(self, weights: str) -> int:
        """Bytes of the weights. weights: a key of `BYTES`."""
        layers = self.parameters - self.head - self.kept
        if weights == "bfloat16":
            return round(self.parameters * BYTES["bfloat16"])
        return round(layers * BYTES[weights] + self.head * BYTES["int8"] + self.kept * BYTES["bfloat16"])

    def fits(self, free: int, weights: str) -> bool:
        """Return whether `free` bytes hold the weights and leave `KV_SHARE` to the KV cache."""
        return self.memory(weights) <= free * (1 - KV_SHARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models with the same ``model_type`` in config.json. Paths to code are ``package.module:name``, so that the
    frontend does not import torch."""

    model_type: str
    chat_template: Template | None = None
    """For checkpoints without a template."""
    models: str = ""
    short_names: tuple[NamedModel, ...] = ()
    other_architectures: tuple[str, ...] = ()
    """Other spellings of ``architectures`` in config.json."""
    tokenizer: str | None = None
    """Reads the tokenizer of a folder without tokenizer.json (`prompt.convert`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageFamily(Family):
    """A decoder, by itself or inside a vision-language model."""

    defaults: Config
    """Defaults of Transformers' config class, which published config.json files leave out."""
    build: Callable[[Config], ArchSpec]
    """From a config with `defaults`."""
    architecture: str | None = None
    """``architectures`` of config.json; None: only inside vision-language models."""
    names: Names = ()
    """From tensor names of checkpoints to names of the decoder here."""
    gguf: Mapping[str, GGUFText] = field(default_factory=dict)
    """By ``general.architecture`` of GGUF files."""
    end_token: str = "eos_token_id"
    """Field of config.json with the tokens that end an answer."""
    more_ends: Callable[[Config], Collection[int]] = lambda config: ()
    """More tokens that end an answer and that no file names."""

    @property
    def takes(self) -> str:
        return "text"

    def rename(self, name: str) -> str:
        """From a tensor's name in the language model of a checkpoint to its name here."""
        return rename(name, (*self.names, *_COMMON))


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily(Family):
    name: str = ""
    """Distinguishes families with the same `model_type`."""
    architecture: str
    matches: Callable[[Config], bool] | None = None
    """Selects among families with the same `architecture`."""
    text_type: str
    """Default ``model_type`` of the language model."""
    text_fields: Callable[[Config], Config] = lambda config: {}
    """Settings of the language model from other parts of config.json."""
    tied: bool = False
    """Default of ``tie_word_embeddings``."""
    bidirectional: Bidirectional | None = None
    """Prompt tokens that attend to each other in both directions."""
    names: Names = ()
    """From tensor names of checkpoints to names of the modules here."""
    gguf: Mapping[str, GGUFTower] = field(default_factory=dict)
    """By ``clip.projector_type`` of GGUF files."""

    tower: str
    """Makes the `VisionEncoder` from config, decoder width, ``dtype=`` and ``device=``. Raises like `load_model`."""
    tower_name: str | None = None
    """Name of the tower in tensor names; None: tensors have the names of its children."""
    reads_question: bool = False
    """An encoder reads the question with the image."""

    image_processor: str = FIXED_SIZE
    """Makes the `ImageProcessor` from `ImageFiles`, unless ``image_processor_type`` names another."""
    image_processor_types: tuple[str, ...] = ()
    """Prefixes of the ``image_processor_type`` values that `image_processor` implements. The first is the default."""
    image_settings: Callable[[Config], Config] = lambda config: {}
    """Settings of the image processor for checkpoints without such a file."""

    vision_config: Callable[[Config], Config] = vision_section
    """``vision_config`` of config.json with the family's own defaults."""
    image_tokens: Callable[[Config], int | None] = lambda config: None
    """Placeholders of an image of fixed size, if their number does not follow from the tower."""
    image_token_id: int | None
    """Default placeholder of an image; None: images have no token."""
    config_placeholder: Callable[[Config], object] = lambda config: config.get(
        "image_token_index", config.get("image_token_id")
    )
    """The placeholder that config.json names."""
    video_token_id: int | None = None
    image_ends: Mapping[str, int] = field(default_factory=dict)
    """Tokens before and after an image, as config.json names them, where chat templates write only the first."""
    frame_ends: Mapping[str, int] = field(default_factory=dict)
    """Tokens before and after each video frame, as config.json names them, where times of frames are text."""
    frames_are_images: bool = False
    """Video frames have the tokens of images."""
    prompts: str | None = None
    """Makes `OneImagePrompts` from config.json, for models without conversations."""
    videos: bool = False

    @property
    def takes(self) -> str:
        if self.image_token_id is None:
            return "text, one image"
        return "text, images, videos" if self.videos else "text, images"

    @property
    def key(self) -> str:
        return self.name or self.model_type

    def text_config(self, config: Config) -> Config:
        """Settings of the language model, with its ``model_type``. Raises ModelLoadError for a broken config."""
        nested = config.get("text_config")
        if nested is None:
            nested = config if "hidden_size" in config else {}
        if not isinstance(nested, Mapping):
            raise ModelLoadError("config.json: text_config is not an object")
        own_type = nested.get("model_type") if nested is not config else None
        return {**nested, **self.text_fields(config), "model_type": own_type or self.text_type}

    def placeholder(self, config: Config) -> int | None:
        """The token that stands for an image. Raises ModelLoadError if config.json names something else."""
        if self.image_token_id is None:
            return None
        found = self.config_placeholder(config)
        token_id = self.image_token_id if found is None else found
        if not isinstance(token_id, int):
            raise ModelLoadError(f"config.json: image_token_index is {token_id!r}, not a token id")
        return token_id
