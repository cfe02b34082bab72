"""The published files of GLM-OCR: all tensors but those that predict further tokens are found under their names, and
prompts are what its processor writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.published_glm_ocr import tensor_shapes, write_published
from vlmserve.config import MediaConfig
from vlmserve.errors import InvalidRequestError
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.models.registry import Description
from vlmserve.models.weights import Checkpoint, merge_as_stored, weight_slots
from vlmserve.prompt.checkpoint import read_prompt_files

IMAGE = 59280
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
    assert (rope.size, rope.theta, rope.parameters["mrope_section"]) == (128, 10000, [16, 24, 24])
    parts = description.build(spec, TorchReference(), dtype=torch.bfloat16, device=META)
    merge_as_stored(parts.modules, checkpoint.names)
    slots = dict(weight_slots(parts.modules))
    published = {checkpoint.canonical(name): shape for name, shape in tensor_shapes().items()}
    of_prediction = {name for name in published if name.startswith("language_model.layers.16.")}
    assert checkpoint.names - slots.keys() == of_prediction
    assert {name: tuple(slot.shape) for name, slot in slots.items()} == {
        name: shape for name, shape in published.items() if name not in of_prediction
    }
    assert description.image_token_id == IMAGE
    assert read_prompt_files(folder).end_token_ids == {59246, 59253}


@pytest.mark.parametrize(
    ("size", "grid"), [((640, 480), (1, 17, 23)), ((20, 40), (1, 4, 2)), ((5200, 3300), (1, 62, 98))], ids=str
)
def test_images_take_the_tokens_that_the_processor_counts(
    preparer: RequestPreparer, size: tuple[int, int], grid: tuple[int, int, int]
) -> None:
    parts = [{"type": "image", "image": Image.new("RGB", size)}, {"type": "text", "text": "Text Recognition:"}]
    prompt = preparer.chat([{"role": "user", "content": parts}], allow_local=True)
    [span] = prompt.images
    assert span.image.grid == grid
    assert span.image.pixels.shape == (1, 3, 28 * grid[1], 28 * grid[2])
    assert prompt.token_ids[span.start : span.end] == [IMAGE] * (grid[1] * grid[2])
    decode = preparer.tokenizer.decode
    assert decode(prompt.token_ids[: span.start], skip_special_tokens=False) == (
        "[gMASK]<sop><|user|>\n<|begin_of_image|>"
    )
    assert decode(prompt.token_ids[span.end :], skip_special_tokens=False) == (
        "<|end_of_image|>Text Recognition:<|assistant|>\n"
    )


def test_the_bounds_of_the_processor_count_an_image_twice(preparer: RequestPreparer) -> None:
    image = {"type": "image", "image": Image.new("RGB", (640, 480)), "max_pixels": 9633792 // 2 + 1}
    with pytest.raises(InvalidRequestError, match=r"max_pixels is 4,816,897; .* this server's max_pixels, 4,816,896"):
        preparer.chat([{"role": "user", "content": [image]}], allow_local=True)
