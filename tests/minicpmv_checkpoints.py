"""Small random checkpoints of MiniCPM-V with all files that a server needs, and Transformers' processor for them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import transformers
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil

from tests.checkpoints import TEXT, VISION, write_tokenizer
from tests.models.test_families import QWEN35
from tests.saved_models import save_model
from vlmserve.types import ImageInput, Pieces

NAMED = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}
SLICES: dict[str, Any] = {
    "image_processor_type": "MiniCPMV4_6ImageProcessor",
    "patch_size": 4,
    "scale_resolution": 32,
    "max_slice_nums": 6,
}
"""Embeddings of 16 pixels, pieces of about 32 x 32."""


def make_minicpmv(
    folder: Path, *, version: str = "4_6", downsample_mode: str = "16x", settings: dict[str, Any] | None = None
) -> Path:
    """A MiniCPM-V checkpoint in `folder`. settings: of the image processor."""
    tokenizer = write_tokenizer(folder, takes_images=False)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in NAMED.values()])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, "extra_special_tokens": NAMED}))
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(template.replace("<image>", NAMED["image_token"]))
    sizes = {"num_hidden_layers": 3, "image_size": 20, "patch_size": 4, "initializer_range": 0.15}
    text = {**TEXT, **QWEN35, "vocab_size": tokenizer.get_vocab_size() + 5, "model_type": "qwen3_5_text"}
    config = getattr(transformers, f"MiniCPMV{version}Config")(
        vision_config={**VISION, **sizes},
        text_config=text,
        image_token_id=tokenizer.token_to_id(NAMED["image_token"]),
        video_token_id=tokenizer.token_to_id(NAMED["video_token"]),
        insert_layer_id=1,
        downsample_mode=downsample_mode,
        **({} if version == "4_6" else _marks(tokenizer)),
    )
    save_model(folder, getattr(transformers, f"MiniCPMV{version}ForConditionalGeneration"), config)
    processor = {**SLICES, "downsample_mode": downsample_mode, **(settings or {})}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": f"MiniCPMV{version}Processor"}))
    return folder


def _marks(tokenizer: Tokenizer) -> dict[str, int]:
    """Tokens that have places on the canvas of an image, as config.json names them."""
    marks = ("image_start", "image_end", "slice_start", "slice_end")
    ids = {f"{mark}_id": tokenizer.token_to_id(NAMED[f"{mark}_token"]) for mark in marks}
    return {**ids, "newline_id": tokenizer.encode("\n", add_special_tokens=False).ids[0]}


def minicpmv_processor(folder: Path) -> Any:
    """Transformers' processor without its part for videos, which needs torchvision."""
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    name = json.loads((folder / "processor_config.json").read_text())["processor_class"]
    own: type[Any] = getattr(transformers, name)
    without_videos = type(name, (own,), {"check_argument_for_proper_class": lambda self, name, argument: argument})
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, extra_special_tokens=NAMED)
    settings.pop("image_processor_type")
    return without_videos(
        MiniCPMV4_6ImageProcessorPil(**settings),
        SimpleNamespace(slice_mode=True, downsample_mode="16x"),
        tokenizer,
        chat_template=(folder / "chat_template.jinja").read_text(),
    )


def side_by_side(pixels: npt.NDArray[Any], patch: int) -> npt.NDArray[Any]:
    """``[1, 3, height, width]`` to ``[1, 3, patch, patches * patch]``, which stays as it is."""
    rows = np.split(pixels, pixels.shape[2] // patch, 2)
    return np.concatenate(rows, 3)


def grids_of(image: ImageInput) -> list[tuple[int, int]]:
    """Rows and columns of patches of 4 pixels of each piece."""
    _, _, height, width = image.pixels.shape
    return list(image.tiling.grids) if isinstance(image.tiling, Pieces) else [(height // 4, width // 4)]
