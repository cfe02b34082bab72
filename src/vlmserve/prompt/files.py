"""What the files of a checkpoint say about its prompts, whatever format they have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlmserve.errors import ModelLoadError

MAX_JSON_BYTES = 64 * 2**20
"""Size of a file of settings."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if the file does not exist. Raises ModelLoadError for anything else."""
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


@dataclass(frozen=True)
class PromptFiles:
    """The parts of a checkpoint that decide how prompts are written.

    special_tokens: by name, ``bos_token`` and the like, and the model's own, like ``image_token``.
    image_token_id, video_token_id: the placeholders' ids, None for a model that takes no images, or no videos.
    image_ends: ids of the tokens around an image's placeholders, where chat templates write the first alone, and the
    rest, with empty lines around it, follows from it; None: they write the placeholder.
    frame_ends: ids of the tokens around each frame of a video whose times are text; chat templates write them once
    around the placeholder, if they are not those of images, and they are left out there. None: times are no text.
    frames_are_images: the tokens in and around frames are those of images, and times stand behind them.
    has_own_preprocessing: whether what makes pixels of images for this kind of model is our own.
    chat_template: jinja source, None if there is none.
    """

    model_type: str
    tokenizer_config: Mapping[str, Any]
    special_tokens: Mapping[str, str]
    image_token_id: int | None
    chat_template: str | None
    end_token_ids: frozenset[int] = field(default=frozenset())
    video_token_id: int | None = None
    image_ends: tuple[int, int] | None = None
    frame_ends: tuple[int, int] | None = None
    frames_are_images: bool = False
    has_own_preprocessing: bool = True
