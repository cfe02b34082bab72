"""The published files of PaddleOCR-VL: all tensors that are used are found under their names, and prompts are what its
processor writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.published_paddleocr import IMAGE, tensor_shapes, write_published
from vlmserve.config import MediaConfig
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.models.registry import Description
from vlmserve.models.weights import Checkpoint, weight_slots
from vlmserve.prompt.checkpoint import read_prompt_files

META = torch.device("meta")


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
    assert spec.max_position == 131072
    rope = spec.ropes[0]
    assert rope is not None
    assert (rope.size, rope.theta, rope.parameters["mrope_section"]) == (128, 500000, [16, 24, 24])
    parts = description.build(spec, TorchReference(), dtype=torch.bfloat16, device=META)
    slots = dict(weight_slots(parts.modules))
    published = {checkpoint.canonical(name): shape for name, shape in tensor_shapes().items()}
    unused = checkpoint.names - slots.keys()
    assert {name for name in unused if not name.startswith("visual.head.")} == {
        "visual.embeddings.packing_position_embedding.weight"
    }
    assert {name: tuple(slot.shape) for name, slot in slots.items()} == {
        name: shape for name, shape in published.items() if name not in unused
    }
    assert description.image_token_id == IMAGE
    assert read_prompt_files(folder).end_token_ids == {2}


@pytest.mark.parametrize(
    ("size", "grid"), [((640, 480), (1, 17, 23)), ((100, 20), (1, 7, 31)), ((3200, 2400), (1, 51, 69))], ids=str
)
def test_images_take_the_tokens_that_the_processor_counts(
    preparer: RequestPreparer, size: tuple[int, int], grid: tuple[int, int, int]
) -> None:
    parts = [{"type": "image", "image": Image.new("RGB", size)}, {"type": "text", "text": "OCR:"}]
    prompt = preparer.chat([{"role": "user", "content": parts}], allow_local=True)
    [span] = prompt.images
    assert span.image.grid == grid
    assert span.image.pixels.shape == (1, 3, 28 * grid[1], 28 * grid[2])
    assert span.image.pixels.min() == -1
    assert prompt.token_ids[span.start : span.end] == [IMAGE] * (grid[1] * grid[2])
    decode = preparer.tokenizer.decode
    assert decode(prompt.token_ids[: span.start], skip_special_tokens=False) == (
        "<|begin_of_sentence|>User: <|IMAGE_START|>"
    )
    assert decode(prompt.token_ids[span.end :], skip_special_tokens=False) == "<|IMAGE_END|>OCR:\nAssistant:\n"
