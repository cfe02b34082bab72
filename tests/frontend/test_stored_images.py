"""Prepared images on disk."""

from __future__ import annotations

import io
import json
import mmap
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.mock_checkpoint import make_mock_checkpoint
from tests.waiting import wait_until
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.frontend.stored_images import StoredImages
from vlmserve.levels import Levels
from vlmserve.media.cache import ImageCache
from vlmserve.models.hub import resolve_model
from vlmserve.settings.config import EngineConfig, MediaConfig
from vlmserve.tower_inputs import FurtherInputs, NamedArray
from vlmserve.types import ImageInput, ImageSize

KEY = b"k" * 32


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return EngineConfig(model="pixie", disk_cache=str(tmp_path))


def prepare(preparer: RequestPreparer, seed: int, salt: str = "") -> ImageInput:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (40, 60, 3), np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    parts = [{"type": "image", "image": file.getvalue()}, {"type": "text", "text": "What is it?"}]
    return preparer.chat([{"role": "user", "content": parts}], allow_local=True, cache_salt=salt).images[0].image


def start(config: EngineConfig, folder: Path | None = None) -> RequestPreparer:
    return RequestPreparer(folder or resolve_model("pixie"), MediaConfig(), engine=config)


def opened(config: EngineConfig) -> StoredImages:
    stored = start(config).media.image_cache.stored
    assert isinstance(stored, StoredImages)
    return stored


def edited(folder: Path, change: Callable[[dict[str, Any]], None], name: str, model: Path | None = None) -> Path:
    """Copy a model without weights, and change one of its files. model: default: pixie."""
    source = model or resolve_model("pixie")
    copy = shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    settings = json.loads((copy / name).read_text())
    change(settings)
    (copy / name).write_text(json.dumps(settings))
    return copy


def equal(one: ImageInput, other: ImageInput) -> bool:
    fields = [(getattr(one, name), getattr(other, name)) for name in one.__struct_fields__ if name != "pixels"]
    return all(own == theirs for own, theirs in fields) and np.array_equal(one.pixels, other.pixels)


def test_later_starts_decode_no_known_image(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare(start(config), 1)
    wait_until(lambda: [*tmp_path.glob("*.entry")] != [])
    again = start(config)
    monkeypatch.setattr("vlmserve.media.sources.decode_opened", None)
    found = prepare(again, 1)
    assert equal(found, first)
    assert found.pixels.dtype == first.pixels.dtype
    assert not found.pixels.flags.writeable
    stats = again.media.image_cache.stats()
    assert (stats.hits, stats.misses) == (1, 0)
    with pytest.raises(TypeError):
        prepare(again, 2)
    with pytest.raises(TypeError):
        prepare(again, 1, salt="tenant")


def keep_class_token(config: dict[str, Any]) -> None:
    config["vision_feature_select_strategy"] = "full"


def rename_last_token(tokenizer: dict[str, Any]) -> None:
    model = tokenizer["model"]
    model["merges"].pop()
    model["vocab"]["renamed"] = model["vocab"].pop(max(model["vocab"], key=model["vocab"].get))


@pytest.mark.parametrize(
    ("name", "change", "added"), [("config.json", keep_class_token, 1), ("tokenizer.json", rename_last_token, 0)]
)
def test_models_share_no_prepared_images(
    config: EngineConfig, tmp_path: Path, name: str, change: Callable[[dict[str, Any]], None], added: int
) -> None:
    """Their pixels may be equal, but not the tokens of an image. added: tokens of the other model's image."""
    (tmp_path / "llava").mkdir()
    llava = make_mock_checkpoint(tmp_path / "llava")
    first = prepare(start(config, llava), 1)
    wait_until(lambda: [*tmp_path.glob("*.entry")] != [])
    other = start(config, edited(tmp_path / "other", change, name, llava))
    assert prepare(other, 1).num_tokens == first.num_tokens + added
    stats = other.media.image_cache.stats()
    assert (stats.hits, stats.misses) == (0, 1)


def test_read_images_share_no_memory(config: EngineConfig, tmp_path: Path) -> None:
    stored, pixels = opened(config), np.zeros((1, 3, 400, 400), np.uint8)
    stored.store(KEY, ImageInput(KEY, pixels, 1))
    wait_until(lambda: [*tmp_path.glob("*.entry")] != [])
    found = stored.read(KEY)
    assert found is not None
    memory: Any = found.pixels
    while not isinstance(memory, mmap.mmap):
        memory = memory.obj if isinstance(memory, memoryview) else memory.base
    assert len(memory) < 1.1 * pixels.nbytes


def test_changed_files_are_decoded_again(config: EngineConfig, tmp_path: Path) -> None:
    first = prepare(start(config), 1)
    wait_until(lambda: [*tmp_path.glob("*.entry")] != [])
    [path] = tmp_path.glob("*.entry")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    again = start(config)
    assert equal(prepare(again, 1), first)
    assert again.media.image_cache.stats().misses == 1


def test_nothing_is_stored_without_a_disk_cache(tmp_path: Path) -> None:
    assert start(EngineConfig(model="pixie")).media.image_cache.stored is None


def test_all_fields_are_read_back(config: EngineConfig, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).standard_normal((2, 3, 5, 7)).astype(np.float32)
    masks = FurtherInputs(13, (NamedArray("mask", "uint8", (2, 3), bytes(range(6))),))
    image = ImageInput(
        KEY, pixels, 13, (2, 2, 3), tiling=masks, text=((6, 17),), end_id=4, has_label=False,
        size=ImageSize(9, 8, 7, 5, (0.0, 0.5, 7.0, 5.0), 13), levels=Levels(1 / 255, (0.5,) * 3, None),
    )  # fmt: skip
    stored = opened(config)
    stored.store(KEY, image)
    wait_until(lambda: [*tmp_path.glob("*.entry")] != [])
    found = stored.read(KEY)
    assert found is not None
    assert equal(found, image)


def test_cache_without_memory_reads_from_disk(config: EngineConfig, tmp_path: Path) -> None:
    stored = opened(config)
    image = ImageInput(KEY, np.zeros((1, 3, 2, 2), np.uint8), 1)
    stored.store(KEY, image)
    wait_until(lambda: [*tmp_path.glob("*.entry")] != [])
    cache = ImageCache(0)
    cache.stored = stored

    def fail() -> ImageInput:
        raise AssertionError("it is on disk")

    assert equal(cache.get(KEY, fail), image)
