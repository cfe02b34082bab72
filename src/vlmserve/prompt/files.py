"""Settings of prompts in a checkpoint, in any file format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlmserve.errors import ModelLoadError
from vlmserve.families.retrievers import without_nesting

EXTRA_TEMPLATES = "additional_chat_templates"
"""Folder of named chat templates."""
MAX_JSON_BYTES = 64 * 2**20
"""Maximum bytes of a settings file."""


def read_json(path: Path) -> dict[str, Any]:
    """Return {} if the file does not exist. Raises ModelLoadError for anything but an object."""
    if not path.is_file():
        return {}
    if (size := path.stat().st_size) > MAX_JSON_BYTES:
        raise ModelLoadError(
            f"{path.name} has {size // 2**20:,} MiB; at most {MAX_JSON_BYTES // 2**20} MiB are supported"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError, OSError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """For a retriever, return the part about its vision-language model. Raises ModelLoadError."""
    return without_nesting(read_json(folder / "config.json"))


@dataclass(frozen=True)
class PromptFiles:
    tokenizer_config: Mapping[str, Any]
    special_tokens: Mapping[str, str]
    """By name, such as ``bos_token``, including the model's own, such as ``image_token``."""
    image_token_id: int | None
    """The placeholder of an image."""
    chat_template: str | None
    """Jinja source."""
    tool_template: str | None = None
    """Jinja source for requests with tools. None: `chat_template`."""
    end_token_ids: frozenset[int] = field(default=frozenset())
    video_token_id: int | None = None
    """The placeholder of a video."""
    image_ends: tuple[int, int] | None = None
    """Tokens around an image's placeholders, if chat templates write only the first token. Then vlmserve adds the rest
    and empty lines."""
    frame_ends: tuple[int, int] | None = None
    """Tokens around each video frame with a timestamp. Chat templates write them once around the video's placeholder,
    unless `frames_are_images`."""
    frames_are_images: bool = False
    """Frames use image tokens, and timestamps follow them."""
    converter: str | None = None
    """Path of a function that reads a tokenizer without tokenizer.json (`Family.tokenizer`)."""
    has_own_preprocessing: bool = True
    """vlmserve preprocesses images, not transformers."""
