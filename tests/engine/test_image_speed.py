"""What images cost on this machine, for all kinds of towers."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.blip import make_blip
from tests.checkpoints import make_idefics3, make_internvl, make_llava, make_mistral3, make_qwen_vl
from tests.models.test_decoder import load
from tests.moondream import make_moondream
from vlmserve.engine.engine import Engine
from vlmserve.engine.image_speed import SPEEDS, image_cost
from vlmserve.models.protocols import LoadedModel
from vlmserve.settings.config import EngineConfig

MAKERS: dict[str, Callable[[Path], object]] = {
    "llava": make_llava,
    "idefics3": make_idefics3,
    "internvl": make_internvl,
    "mistral3": make_mistral3,
    "qwen2.5-vl": lambda folder: make_qwen_vl(folder, "qwen2_5_vl"),
    "qwen3-vl": lambda folder: make_qwen_vl(folder, "qwen3_vl"),
    "moondream": make_moondream,
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", MAKERS)
def test_the_cost_follows_the_macs_of_the_tower(name: str, tmp_path: Path):
    MAKERS[name](tmp_path)
    model = load(tmp_path)
    tower = model.vision
    assert tower is not None
    assert tower.example_shape is not None
    assert tower.larger_shape is not None
    cost = image_cost(model, b"model", 1024, 1.0)
    assert cost is not None
    for tiles, channels, height, width in (tower.example_shape, tower.larger_shape):
        seconds = tower.products((tiles, channels, height, width)) / 1024
        assert cost.seconds(tiles * height * width) == pytest.approx(seconds)
    assert (cost.per_square == 0) == (name in ("llava", "idefics3", "internvl")), "tiles cost the same each"


def test_one_image_size_gives_no_area_cost(tmp_path: Path):
    make_blip(tmp_path)
    assert image_cost(load(tmp_path), b"model", 1024, 1.0) is None


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("qwen")
    make_qwen_vl(folder, "qwen3_vl")
    return load(folder)


def test_every_start_has_the_same_cost(qwen: LoadedModel):
    first = image_cost(qwen, b"model", 1000, 1.0)
    assert image_cost(qwen, b"model", 1000, 7.0) == first
    assert image_cost(qwen, b"other", 1000, 7.0) != first


def test_similar_speeds_are_rounded_to_one(qwen: LoadedModel):
    costs = {image_cost(qwen, f"{number}".encode(), 1024, 1.0 + number / 100) for number in range(-6, 7)}
    assert len(costs) == 1
    for per_mac in SPEEDS.facts.values():
        assert math.log2(per_mac * 1024) == pytest.approx(0)


def test_an_engine_tells_what_images_cost(qwen: LoadedModel):
    cost = Engine.from_model(EngineConfig(kv_cache_memory=2**20), qwen).info.image_cost
    assert cost is not None
    assert 0 < cost.seconds(100) < 10
