"""MiniCPM-V's tower and merger against transformers' own, for images and slices of several sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    MiniCPMV4_6Config,
    MiniCPMV4_6ForConditionalGeneration,
)

from tests.media.images_for_tests import noise
from tests.minicpmv_checkpoints import grids_of, make_minicpmv, side_by_side
from tests.models.test_decoder import assert_equal, load
from tests.normalized import normalized
from tests.static_ranges import use_ranges
from vlmserve.calibration.forward import hidden_states, make_groups
from vlmserve.errors import InvalidImageError, ModelLoadError, UnsupportedModelError
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.models.registry import META, Description
from vlmserve.models.vision.minicpmv import MiniCPMVision
from vlmserve.models.weights import Checkpoint, merge_as_stored, weight_slots
from vlmserve.settings.config import MediaConfig
from vlmserve.types import ImageSpan, Pieces

IMAGES = [((4, 8),), ((8, 4), (4, 12), (4, 12), (4, 12)), ((12, 4),), ((4, 4),), ((8, 8), (16, 4), (16, 4))]
"""Rows and columns of patches of each piece of each image. Each image has its own sizes."""


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("downsample_mode", ["16x", "4x"])
@torch.inference_mode()
def test_embeddings_equal_transformers(tmp_path: Path, downsample_mode: str) -> None:
    folder = make_minicpmv(tmp_path, downsample_mode=downsample_mode)
    theirs = MiniCPMV4_6ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    vision = load(folder).vision
    assert vision is not None
    generator = torch.Generator().manual_seed(1)
    pixels, expected = [], []
    for grids in IMAGES:
        pieces = [torch.randn(1, 3, 4 * rows, 4 * columns, generator=generator) for rows, columns in grids]
        packed = torch.cat([torch.from_numpy(side_by_side(piece.numpy(), 4)) for piece in pieces], 3)
        features = theirs.model.get_image_features(packed, torch.tensor(grids)).pooler_output
        expected.append(torch.cat(features))
        pixels.append(packed if len(grids) > 1 else pieces[0])
    tilings = [Pieces(grids) if len(grids) > 1 else None for grids in IMAGES]
    together = vision.encode(pixels, tilings)
    backwards = vision.encode(pixels[::-1], tilings[::-1])[::-1]
    alone = [vision.encode([image], [tiling])[0] for image, tiling in zip(pixels, tilings, strict=True)]
    kernels = use_ranges(vision)
    in_one_batch = vision.encode(pixels, tilings)
    assert min(kernel.num_attended for kernel in kernels[:3]) == 1
    for encoded in (together, backwards, alone, in_one_batch):
        torch.testing.assert_close(encoded, expected, atol=1e-4, rtol=1e-4)
    for own, tiling, image in zip(together, tilings, pixels, strict=True):
        vision.check(tuple(image.shape), len(own), tiling)
        assert vision.products(tuple(image.shape), tiling) > 0


@pytest.mark.parametrize("version", ["4_6", "4_7"])
def test_all_tensors_of_transformers_have_slots(tmp_path: Path, version: str) -> None:
    description = Description.read(make_minicpmv(tmp_path, version=version))
    checkpoint = Checkpoint(tmp_path, description.rename)
    parts = description.build(description.spec(checkpoint), TorchReference(), dtype=torch.float32, device=META)
    merge_as_stored(parts.modules, checkpoint.names)
    slots = {name: tuple(slot.shape) for name, slot in weight_slots(parts.modules)}
    with META:
        theirs = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(tmp_path))
    shapes = {checkpoint.canonical(name): tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
    assert slots == shapes


@torch.inference_mode()
def test_frames_of_videos_equal_transformers(tmp_path: Path) -> None:
    """Frame after frame without text, in a prompt with an image."""
    folder = make_minicpmv(tmp_path, version="4_7")
    theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    frames = [noise(40, 30), noise(40, 30), noise(40, 30)]
    content = [
        {"type": "video", "video": frames},
        {"type": "text", "text": "\na"},
        {"type": "image", "image": frames[0]},
    ]
    prompt = RequestPreparer(folder, MediaConfig()).chat([{"role": "user", "content": content}], allow_local=True)
    first, second, third, last = prompt.images
    assert (first.end, second.end) == (second.start, third.start)
    assert len(prompt.token_ids[third.end : last.start]) == 4, "the image alone has a number"
    ids, types = torch.tensor([prompt.token_ids]), torch.zeros(1, len(prompt.token_ids), dtype=torch.int)
    types[ids == theirs.config.image_token_id] = 1
    types[:, : third.end] *= 2
    ids[types == 2] = theirs.config.video_token_id

    def inputs(spans: Sequence[ImageSpan], suffix: str) -> dict[str, Tensor]:
        grids = [grid for span in spans for grid in grids_of(span.image)]
        packed = np.concatenate([side_by_side(normalized(span.image), 4) for span in spans], 3)
        return {f"pixel_values{suffix}": torch.from_numpy(packed), f"target_sizes{suffix}": torch.tensor(grids)}

    media = inputs((first, second, third), "_videos") | inputs((last,), "")
    expected = theirs(input_ids=ids, mm_token_type_ids=types, **media).logits[0]
    loaded = load(folder)
    [group] = make_groups(loaded.language_model, [prompt])
    assert_equal([loaded.language_model.logits(hidden_states(loaded, group))], [expected])


@torch.inference_mode()
def test_default_tower_matches_transformers_shapes() -> None:
    config = MiniCPMV4_6Config()
    with META:
        theirs = MiniCPMV4_6ForConditionalGeneration(config).model
    vision = MiniCPMVision(config.to_dict(), config.text_config.hidden_size, dtype=torch.float32, device=META)
    ours = {name: tuple(slot.shape) for name, slot in weight_slots(vision)}
    shapes = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
    assert ours == {name: shape for name, shape in shapes.items() if not name.startswith("language_model.")}


def test_other_pixels_are_rejected(tmp_path: Path) -> None:
    vision = load(make_minicpmv(tmp_path)).vision
    assert vision is not None
    with pytest.raises(InvalidImageError, match=r"whole squares of 16 pixels, not \(1, 3, 24, 16\)"):
        vision.check((1, 3, 24, 16), 1)
    with pytest.raises(InvalidImageError, match="one image of 3 channels"):
        vision.check((2, 3, 16, 16), 2)
    with pytest.raises(InvalidImageError, match="makes 3 embeddings and has 4 placeholders"):
        vision.check((1, 3, 4, 192), 4, Pieces(((4, 4), (8, 4))))
    with pytest.raises(InvalidImageError, match="whole squares of 16 pixels"):
        vision.check((1, 3, 4, 128), 3, Pieces(((4, 4), (8, 4))))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"insert_layer_id": 3}, ModelLoadError, "insert_layer_id is 3, but the vision tower has 3 layers"),
        ({"merger_times": 2}, UnsupportedModelError, "merger_times 2"),
        ({"merge_kernel_size": [2, 4]}, UnsupportedModelError, r"merge_kernel_size \[2, 4\]"),
    ],
)
def test_impossible_towers_are_rejected(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    config = MiniCPMV4_6Config(vision_config={"num_hidden_layers": 3}, insert_layer_id=1).to_dict()
    with pytest.raises(error, match=message):
        MiniCPMVision({**config, **fields}, 8, dtype=torch.float32, device=META)
