"""Image processors of checkpoints that name none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.published import FOLDER, write_published
from vlmserve.config import MediaConfig
from vlmserve.frontend.processors import image_processor
from vlmserve.prompt.tokenizer import Tokenizer


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
