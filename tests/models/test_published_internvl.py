"""The published files of InternVL3-1B-hf: all tensors are found under their names, and prompts are what its processor
writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.published_internvl import tensor_shapes, write_published
from vlmserve.config import MediaConfig
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.models.registry import Description
from vlmserve.models.weights import Checkpoint, weight_slots
from vlmserve.prompt.checkpoint import read_prompt_files

BEGIN, END, CONTEXT = 151665, 151666, 151667


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_published(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def preparer(folder: Path) -> RequestPreparer:
    return RequestPreparer(folder, MediaConfig())


def test_every_tensor_has_its_place_and_every_place_its_tensor(folder: Path) -> None:
    description = Description.read(folder)
    checkpoint = Checkpoint(folder, description.rename)
    spec = description.spec(checkpoint)
    assert not spec.tied_embeddings
    assert spec.max_position == 32768
    parts = description.build(spec, TorchReference(), dtype=torch.bfloat16, device=torch.device("meta"))
    slots = dict(weight_slots(parts.modules))
    assert slots.keys() == checkpoint.names
    published = {checkpoint.canonical(name): shape for name, shape in tensor_shapes().items()}
    assert {name: tuple(slot.shape) for name, slot in slots.items()} == published
    assert description.image_token_id == CONTEXT
    assert read_prompt_files(folder).end_token_ids == {151645}


@pytest.mark.parametrize(
    ("size", "tiles"), [((448, 448), 1), ((300, 200), 6), ((640, 480), 12), ((2000, 500), 4), ((500, 3000), 6)], ids=str
)
def test_images_take_the_tokens_that_the_processor_counts(
    preparer: RequestPreparer, size: tuple[int, int], tiles: int
) -> None:
    parts: list[dict[str, Any]] = [
        {"type": "image", "image": Image.new("RGB", size)},
        {"type": "text", "text": "What?"},
    ]
    prompt = preparer.chat([{"role": "user", "content": parts}], allow_local=True)
    [span] = prompt.images
    shown = tiles + (tiles > 1)
    assert span.image.pixels.shape == (shown, 3, 448, 448)
    assert prompt.token_ids[span.start : span.end] == [BEGIN, *[CONTEXT] * (256 * shown), END]
    before, after = (
        preparer.tokenizer.decode(ids, skip_special_tokens=False)
        for ids in (prompt.token_ids[: span.start], prompt.token_ids[span.end :])
    )
    assert before == "<|im_start|>user\n"
    assert after == "\nWhat?<|im_end|>\n<|im_start|>assistant\n"


def test_what_users_write_is_no_image(preparer: RequestPreparer) -> None:
    prompt = preparer.chat([{"role": "user", "content": "<img><IMG_CONTEXT></img> <video>"}])
    assert not {BEGIN, END, CONTEXT} & set(prompt.token_ids)
