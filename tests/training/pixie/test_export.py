"""An exported folder, read by transformers and by this package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer

import vlmserve.pixie
from tests.normalized import normalized
from training.pixie.export import IMAGE_TOKENS, export, new_model
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.pixie.drawing import draw_scene
from vlmserve.pixie.scenes import sample_scene
from vlmserve.settings.config import MediaConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pixie")
    torch.manual_seed(0)
    export(path, tokenizer=Tokenizer.from_file(str(Path(vlmserve.pixie.__file__).parent / "model" / "tokenizer.json")))
    return path


def test_the_model_is_small() -> None:
    assert 5e6 < sum(parameter.numel() for parameter in new_model().parameters()) < 15e6


def test_unknown_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="do not fit"):
        export(tmp_path, {"something.weight": torch.zeros(1)})


def test_export_equals_transformers_prompt_and_pixels(folder: Path) -> None:
    from transformers import AutoProcessor

    images = [draw_scene(sample_scene(seed)) for seed in range(2)]
    content = [{"type": "image", "image": image} for image in images]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": "Same colour?"}]}]
    processor = AutoProcessor.from_pretrained(folder)
    expected = processor.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    prompt = RequestPreparer(folder, MediaConfig()).chat(messages, allow_local=True)
    assert prompt.token_ids == expected["input_ids"][0].tolist()
    assert prompt.token_ids.count(3) == 2 * IMAGE_TOKENS
    assert len(prompt.images) == 2
    for image, pixels in zip(images, expected["pixel_values"], strict=True):
        squashed = np.asarray(image.resize((108, 108), Image.Resampling.BICUBIC), dtype=np.float32)
        trained = (squashed / 255 - 0.5) / 0.5
        np.testing.assert_allclose(pixels.numpy(), trained.transpose(2, 0, 1), atol=1e-6)
    for span, pixels in zip(prompt.images, expected["pixel_values"], strict=True):
        np.testing.assert_allclose(np.asarray(normalized(span.image)[0]), pixels.numpy(), atol=1e-6)


def test_transformers_loads_the_weights_that_were_exported(folder: Path) -> None:
    from transformers import LlavaForConditionalGeneration

    torch.manual_seed(0)
    expected = new_model().state_dict()
    loaded = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    assert loaded.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(loaded[key], value.to(torch.bfloat16)), key


def test_the_package_loads_the_folder(folder: Path) -> None:
    from vlmserve.models.load_settings import LoadSettings
    from vlmserve.models.registry import load_model

    assert load_model(folder, LoadSettings(device=torch.device("cpu"), dtype=torch.float32)) is not None
