"""The published files of Qwen3-VL-2B-Instruct: all tensors are found under their names, and prompts are what its
processor writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.published_qwen3_vl import tensor_shapes, write_published
from vlmserve.config import MediaConfig
from vlmserve.errors import ModelLoadError
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.kernels.torch_reference import TorchReference
from vlmserve.models.registry import Description
from vlmserve.models.vision_families import VISION_FAMILIES
from vlmserve.models.weights import Checkpoint, weight_slots
from vlmserve.prompt.checkpoint import read_prompt_files

VISION_START, VISION_END, IMAGE, VIDEO = 151652, 151653, 151655, 151656
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
    assert spec.deepstack == 3
    assert spec.tied_embeddings
    assert spec.max_position == 262144
    parts = description.build(spec, TorchReference(), dtype=torch.bfloat16, device=META)
    assert parts.language_model.image_width == 4 * 2048
    slots = dict(weight_slots(parts.modules))
    assert slots.keys() == checkpoint.names
    published = {checkpoint.canonical(name): shape for name, shape in tensor_shapes().items()}
    assert {name: tuple(slot.shape) for name, slot in slots.items()} == published
    assert description.image_token_id == IMAGE
    assert read_prompt_files(folder).end_token_ids == {151643, 151645}


def test_features_for_more_layers_than_there_are_are_refused(folder: Path) -> None:
    config = Description.read(folder).config
    text = {**config["text_config"], "num_hidden_layers": 2}
    text_config = VISION_FAMILIES["qwen3_vl"].text_config({**config, "text_config": text})
    description = Description(folder, config, text_config, "Qwen3VLForConditionalGeneration")
    with pytest.raises(ModelLoadError, match=r"3 layers .deepstack_visual_indexes., and the decoder has 2"):
        description.spec(Checkpoint(folder, description.rename))


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))


def text_around(preparer: RequestPreparer, ids: list[int]) -> str:
    return preparer.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("size", "grid"), [((640, 480), (1, 15, 20)), ((40, 40), (1, 8, 8)), ((5200, 3300), (1, 101, 160))], ids=str
)
def test_images_take_the_tokens_that_the_processor_counts(
    preparer: RequestPreparer, size: tuple[int, int], grid: tuple[int, int, int]
) -> None:
    parts: list[dict[str, Any]] = [
        {"type": "image", "image": Image.new("RGB", size)},
        {"type": "text", "text": "What?"},
    ]
    prompt = preparer.chat([{"role": "user", "content": parts}], allow_local=True)
    [span] = prompt.images
    assert span.image.grid == grid
    assert span.image.pixels.shape == (1, 3, 32 * grid[1], 32 * grid[2])
    assert abs(span.image.pixels).max() <= 1
    assert prompt.token_ids[span.start : span.end] == [IMAGE] * (grid[1] * grid[2])
    before, after = prompt.token_ids[: span.start], prompt.token_ids[span.end :]
    assert text_around(preparer, before) == "<|im_start|>user\n<|vision_start|>"
    assert text_around(preparer, after) == "<|vision_end|>What?<|im_end|>\n<|im_start|>assistant\n"


def test_frames_of_a_video_stand_behind_their_times(preparer: RequestPreparer) -> None:
    frames = [noise(320, 240)] * 5
    content = [{"type": "video", "video": frames, "fps": 2}, {"type": "text", "text": "What?"}]
    prompt = preparer.chat([{"role": "user", "content": content}], allow_local=True)
    [span] = prompt.images
    assert span.image.grid == (3, 8, 10)
    text = text_around(preparer, prompt.token_ids)
    shown = "".join(
        f"<{time} seconds><|vision_start|>{'<|video_pad|>' * 80}<|vision_end|>" for time in ("0.2", "1.2", "2.0")
    )
    assert text == f"<|im_start|>user\n{shown}What?<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.token_ids.count(VISION_START) == prompt.token_ids.count(VISION_END) == 3
    assert prompt.token_ids.count(VIDEO) == span.image.num_embeddings == 240
    small = preparer.chat([{"role": "user", "content": [{**content[0], "max_pixels": 40_000}]}], allow_local=True)
    assert small.images[0].image.grid is not None
    _, rows, columns = small.images[0].image.grid
    assert 20_000 < rows * columns * 32**2 <= 40_000, "each frame has at most so many pixels"


def test_tools_are_described_and_their_results_may_show_images(preparer: RequestPreparer) -> None:
    assert preparer.tool_form.native
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "image", "image": noise(256, 256)}]},
    ]
    prompt = preparer.chat(messages, allow_local=True)
    [span] = prompt.images
    assert text_around(preparer, prompt.token_ids[: span.start]) == (
        '<|im_start|>user\nLook.<|im_end|>\n<|im_start|>assistant\n<tool_call>\n{"name": "look", "arguments": {}}\n'
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n<|vision_start|>"
    )
