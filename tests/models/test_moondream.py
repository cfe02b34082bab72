"""Moondream's parts against the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoints import change_config
from tests.moondream import SETTINGS, TEXT, TOKENS, VISION, Moondream, make_moondream, noise
from tests.normalized import normalized, of_levels, processed
from tests.oracles.moondream import MoondreamOracle
from vlmserve.errors import InvalidImageError, MissingWeightsError, UnsupportedModelError
from vlmserve.families.registry import VISION_FAMILIES, decoder_spec
from vlmserve.media.budget import ImageBudget
from vlmserve.media.crops import CropProcessor
from vlmserve.media.images import DecodedImage
from vlmserve.models.load_settings import LoadSettings
from vlmserve.models.protocols import LoadedModel
from vlmserve.models.registry import load_model
from vlmserve.models.vision.moondream import MoondreamSpec

pytestmark = pytest.mark.usefixtures("kernels")


def load(folder: Path) -> LoadedModel:
    return load_model(folder, LoadSettings(device=torch.device("cpu"), dtype=torch.float32))


@pytest.fixture(scope="module")
def moondream(tmp_path_factory: pytest.TempPathFactory) -> Moondream:
    return Moondream.make(tmp_path_factory.mktemp("moondream"))


@torch.inference_mode()
def test_embeddings_equal_the_oracles(moondream: Moondream) -> None:
    vision = load(moondream.folder).vision
    assert vision is not None
    tilings = set()
    for seed in range(6):
        pil_image, image = moondream.make_image(seed)
        crops, tiles = moondream.oracle.crops(pil_image)
        tilings.add(tiles)
        vision.check(image.pixels.shape, image.num_tokens)
        (actual,) = vision.encode([torch.from_numpy(normalized(image))])
        expected = moondream.oracle.see(crops, tiles)
        assert expected.abs().max() > 0.5
        torch.testing.assert_close(actual.double(), expected, atol=1e-4, rtol=1e-4)
    assert len(tilings) > 3, tilings
    images = [torch.from_numpy(normalized(moondream.make_image(seed)[1])) for seed in (3, 1)]
    assert torch.equal(vision.encode(images)[1], vision.encode(images[1:])[0])


@pytest.mark.parametrize("size", [(900, 21), (21, 900), (3, 4000)])
def test_pictures_of_extreme_shapes_are_seen(moondream: Moondream, size: tuple[int, int]) -> None:
    vision = load(moondream.folder).vision
    assert vision is not None
    processor = CropProcessor({"config": SETTINGS})
    pil_image = DecodedImage.whole(noise(0, *size))
    pixels = processed(processor, pil_image)
    vision.check(pixels.shape, processor.placeholders(pixels, size).num_tokens)


def test_names_may_come_without_the_outer_module(tmp_path: Path) -> None:
    with_it, without = (load(make_moondream(tmp_path / prefix, prefix=prefix)[0]) for prefix in ("model.", ""))
    pixels = [torch.from_numpy(processed(CropProcessor({"config": SETTINGS}), DecodedImage.whole(noise(0, 50, 30))))]
    ids = torch.arange(9)
    assert with_it.vision is not None
    assert without.vision is not None
    assert torch.equal(with_it.vision.encode(pixels)[0], without.vision.encode(pixels)[0])
    assert torch.equal(with_it.language_model.embed(ids), without.language_model.embed(ids))


def test_an_empty_config_means_published_shapes() -> None:
    """The published config.json says nothing of it."""
    config: dict[str, Any] = {"architectures": ["HfMoondream"], "model_type": "moondream1", "config": {}}
    spec = decoder_spec(VISION_FAMILIES["moondream1"].text_config(config))
    assert (spec.hidden_size, spec.intermediate_size, len(spec.attention), spec.vocab_size) == (2048, 8192, 24, 51200)
    assert (spec.attention[0].num_heads, spec.attention[0].head_size, spec.max_position) == (32, 64, 2048)
    assert spec.ropes[0] is not None
    assert spec.ropes[0].size == 32
    tower = MoondreamSpec.from_config(config, 2048)
    assert (tower.side, tower.stride, tower.layers.num_patches) == (27, 19, 729)
    pixels = processed(CropProcessor(config), DecodedImage.whole(noise(0, 800, 600)))
    assert pixels.shape == (1, 3, 378 + 2 * 266 + 112, 4 * 266 + 112)
    assert CropProcessor(config).placeholders(pixels, (800, 600)).num_tokens == 729


@pytest.mark.parametrize(
    "shape",
    [(1, 3, 40, 25), (1, 3, 39, 20), (1, 3, 20, 20), (2, 3, 40, 20), (3, 40, 20), (1, 4, 40, 20), (1, 3, 52, 104)],
    ids=str,
)
def test_pixels_that_do_not_fit_are_refused(moondream: Moondream, shape: tuple[int, ...]) -> None:
    vision = load(moondream.folder).vision
    assert vision is not None
    vision.check((1, 3, 40, 80), TOKENS)
    with pytest.raises(InvalidImageError, match="crops"):
        vision.check(shape, TOKENS)
    with pytest.raises(InvalidImageError, match="25 embeddings and has 24"):
        vision.check((1, 3, 40, 20), 24)


@pytest.mark.parametrize(
    ("part", "fields", "word"),
    [
        ("text", {"prefix_attn": 730}, "prefix_attn"),
        ("vision", {"proj_out_dim": 64}, "64 features"),
        ("vision", {"crop_size": 21}, "21 pixels"),
        ("vision", {"overlap_margin": 3}, "overlap_margin"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(moondream: Moondream, tmp_path: Path, part: str, fields, word: str) -> None:
    folder, _ = make_moondream(tmp_path)
    sections = {"text": TEXT, "vision": VISION}
    change_config(folder, config={**SETTINGS, part: {**sections[part], **fields}})
    with pytest.raises(UnsupportedModelError, match=word):
        load(folder)


def test_other_revisions_names_are_missed_by_name(tmp_path: Path) -> None:
    folder, _ = make_moondream(tmp_path, prefix="text_model.")
    with pytest.raises(MissingWeightsError, match="embed_tokens"):
        load(folder)


# Pixels


@pytest.mark.parametrize(
    "size",
    [(20, 20), (61, 30), (17, 90), (45, 44), (200, 30), (500, 400), (8, 3), (21, 300), (29, 33), (1, 1)],
    ids=str,
)
def test_crops_equal_the_oracles(moondream: Moondream, size: tuple[int, int]) -> None:
    pil_image = noise(1, *size)
    expected, (rows, columns) = moondream.oracle.crops(pil_image)
    pixels = processed(CropProcessor({"config": SETTINGS}), DecodedImage.whole(pil_image))
    assert pixels.dtype == np.float32
    whole, large = pixels[0, :, :20], pixels[0, :, 20:]
    assert large.shape[1:] == (12 * rows + 8, 12 * columns + 8)
    np.testing.assert_allclose(whole[:, :, :20], expected[0], atol=1e-6)
    assert not whole[:, :, 20:].any() or whole[:, :, 20:].max() == -1
    for number, crop in enumerate(expected[1:]):
        row, column = divmod(number, columns)
        cut = large[:, 12 * row : 12 * row + 20, 12 * column : 12 * column + 20]
        np.testing.assert_allclose(cut, crop, atol=1e-6)


@torch.inference_mode()
def test_a_picture_of_low_detail_is_one_crop(moondream: Moondream) -> None:
    oracle = MoondreamOracle({"text": TEXT, "vision": {**VISION, "max_crops": 1}}, moondream.oracle.weights)
    processor = CropProcessor({"config": SETTINGS})
    low, pil_image = processor.within(ImageBudget(low_detail=True)), noise(2, 45, 44)
    crops, tiles = oracle.crops(pil_image)
    assert tiles == (1, 1)
    pixels, placeholders = low.prepare(DecodedImage.whole(pil_image))
    values = of_levels(pixels, low.levels)
    np.testing.assert_allclose(values[0, :, :20], crops[0], atol=1e-6)
    np.testing.assert_allclose(values[0, :, 20:], crops[1], atol=1e-6)
    assert placeholders == processor.prepare(DecodedImage.whole(pil_image))[1]
    vision = load(moondream.folder).vision
    assert vision is not None
    vision.check(pixels.shape, TOKENS)
    (actual,) = vision.encode([torch.from_numpy(values)])
    torch.testing.assert_close(actual.double(), oracle.see(crops, tiles), atol=1e-4, rtol=1e-4)
    for size in ((200, 30), (17, 90), (3, 3), (90, 21)):
        assert processed(low, DecodedImage.whole(noise(3, *size))).shape == (1, 3, 40, 20)
    assert low.fingerprint != processor.fingerprint
    assert processor.within(ImageBudget()) is processor
    assert low.within(ImageBudget(low_detail=True)) is low


def test_whatever_changes_pixels_changes_the_fingerprint() -> None:
    def fingerprint(exact: bool = False, **vision: int) -> bytes:
        return CropProcessor({"config": {"vision": {**VISION, **vision}}}, exact_pixels=exact).fingerprint

    changes = [{}, {"crop_size": 24}, {"enc_patch_size": 5}, {"overlap_margin": 2}, {"max_crops": 5}]
    assert len({*(fingerprint(**change) for change in changes), fingerprint(exact=True)}) == 6
    with pytest.raises(UnsupportedModelError, match="margins"):
        fingerprint(overlap_margin=3)
