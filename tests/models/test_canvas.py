"""Positions of images on a canvas against those of transformers' MiniCPM-V 4.7."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import MiniCPMV4_7Config
from transformers.models.minicpmv4_7.modeling_minicpmv4_7 import MiniCPMV4_7Model

from tests.media.images_for_tests import noise
from tests.media.test_slices import WORDS
from tests.media.test_tiles import SIZES
from tests.minicpmv_checkpoints import SLICES, grids_of
from vlmserve.media.images import DecodedImage
from vlmserve.media.slices import SliceProcessor
from vlmserve.media.sources import process_image
from vlmserve.models.grid_positions import grid_positions
from vlmserve.models.registry import META
from vlmserve.prompt.expand import expand_placeholders
from vlmserve.types import Prompt

IMAGE, LABEL = ord("#"), ord("@")
TEXTS = ["#", "ab#c", "#\n", "a#\n\nb", "##", "#\n#cd", "a#b#\n\n#", "#\nc\n#"]
"""An image at the beginning, at the end, before newlines, beside others."""


def make_prompt(number: int, scale: int) -> Prompt:
    """Images of several sizes in a text; scale: `SliceRecipe.scale`."""
    config = {"model_type": "minicpmv4_7", "vision_config": {"patch_size": 4}}
    processor = SliceProcessor(config, {**SLICES, "scale_resolution": scale}, WORDS)
    text = TEXTS[number % len(TEXTS)]
    sizes = [SIZES[(number + index) % len(SIZES)] for index in range(text.count("#"))]
    images = [process_image(b"", DecodedImage.whole(noise(*size)), processor) for size in sizes]
    label = (lambda index: [LABEL]) if number % 3 == 0 else None
    return expand_placeholders(list(map(ord, text)), IMAGE, images, label=label)


@pytest.fixture(scope="module")
def theirs() -> MiniCPMV4_7Model:
    marks = {"image_start": "<", "image_end": ">", "slice_start": "[", "slice_end": "]", "newline": "\n"}
    with META:
        return MiniCPMV4_7Model(MiniCPMV4_7Config(**{f"{name}_id": ord(mark) for name, mark in marks.items()}))


@pytest.mark.parametrize("scale", [32, 56])
def test_positions_on_a_canvas_equal_transformers(theirs: MiniCPMV4_7Model, scale: int) -> None:
    for number in range(2 * len(SIZES)):
        prompt = make_prompt(number, scale)
        ids = torch.tensor([prompt.token_ids])
        grids = [grid for span in prompt.images for grid in grids_of(span.image)]
        expected, delta = theirs.get_rope_index(ids, (ids == IMAGE).int(), torch.tensor(grids))
        placements, length = [span.placement for span in prompt.images], len(prompt.token_ids)
        assert sum(span.image.num_embeddings for span in prompt.images) == prompt.token_ids.count(IMAGE)
        actual = grid_positions(placements, np.arange(length + 5))
        np.testing.assert_array_equal(actual[:, :length], expected[:, 0].numpy())
        assert (actual[:, length:] == np.arange(length, length + 5) + delta.item()).all()
        for first in range(0, length, 7):
            chunk = grid_positions(placements, np.arange(first, min(first + 7, length)))
            np.testing.assert_array_equal(chunk, actual[:, first : min(first + 7, length)])
