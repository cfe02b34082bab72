"""Image processors and towers of checkpoints that name none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_qwen_vl
from tests.published import FOLDER, write_published
from vlmserve.frontend.processors import image_processor, video_processor
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.registry import load_model
from vlmserve.models.vision.qwen import QwenVisionTower
from vlmserve.prompt.tokenizer import Tokenizer
from vlmserve.settings.config import MediaConfig


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.iterdir() if (path / "config.json").is_file()))
def test_pixels_stay_the_same_without_a_name(tmp_path: Path, name: str) -> None:
    folder, names = write_published(tmp_path, name), 0
    named = image_processor(folder, Tokenizer.from_folder(folder), MediaConfig())
    for path in (folder / "preprocessor_config.json", folder / "processor_config.json"):
        if path.is_file():
            settings = json.loads(path.read_text())
            for section in (settings, settings.get("image_processor", {})):
                names += section.pop("image_processor_type", None) is not None
            path.write_text(json.dumps(settings))
    unnamed = image_processor(folder, Tokenizer.from_folder(folder), MediaConfig())
    assert names == 1
    assert type(unnamed) is type(named)
    assert unnamed.fingerprint == named.fingerprint


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_towers_and_times_of_videos_stay_the_same(tmp_path: Path, kind: str) -> None:
    """The first configs of Qwen2-VL and Qwen2.5-VL have no ``model_type`` for their towers."""
    folder, found = make_qwen_vl(tmp_path, kind), []
    for named in (True, False):
        config = json.loads((folder / "config.json").read_text())
        assert named or config["vision_config"].pop("model_type").startswith(kind)
        (folder / "config.json").write_text(json.dumps(config))
        tower = load_model(folder, LoadSettings(device=torch.device("cpu"), dtype=torch.float32)).vision
        assert isinstance(tower, QwenVisionTower)
        times = video_processor(folder, Tokenizer.from_folder(folder), MediaConfig()).timing
        found.append((tower.spec, times))
    assert found[0] == found[1]
