"""Towers that see images in tiles against transformers, in float32: LLaVA-NeXT, Idefics3 and SmolVLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings

from tests.checkpoints import PINPOINTS, change_config, make_idefics3, make_llava_next, rename_tensors
from tests.media.images_for_tests import noise
from tests.media.test_tiles import NEXT, next_processor
from tests.models.test_llava import load
from tests.normalized import of_levels, processed
from vlmserve.errors import InvalidImageError, MissingWeightsError, UnsupportedModelError
from vlmserve.media.budget import ImageBudget
from vlmserve.media.images import DecodedImage
from vlmserve.models.quantized import save_quantized
from vlmserve.models.vision.siglip import patch_positions
from vlmserve.settings.quantization import QuantizationConfig
from vlmserve.types import Tiling

pytestmark = pytest.mark.usefixtures("native_kernels")

SIZES = [(40, 30), (30, 40), (90, 10), (16, 16), (20, 60), (33, 31), (97, 1), (1, 131), (64, 20)]


def tiles(size: tuple[int, int]) -> tuple[torch.Tensor, Tiling | None, int]:
    """Pixels of an image for LLaVA-NeXT, how they lie, and how many embeddings they become."""
    processor = next_processor({**NEXT, "image_grid_pinpoints": PINPOINTS})
    pixels = processed(processor, DecodedImage.whole(noise(*size)))
    placeholders = processor.placeholders(pixels, size)
    return torch.from_numpy(pixels), placeholders.tiling, placeholders.num_tokens


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "published names": {"published_names": True},
    "several layers": {"vision_feature_layer": [-2, 1]},
    "last layer, projector without bias": {"vision_feature_layer": -1, "multimodal_projector_bias": False},
}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
@torch.inference_mode()
def test_llava_next_puts_tiles_together_as_transformers_does(tmp_path: Path, overrides: dict[str, Any]) -> None:
    folder = make_llava_next(tmp_path, **overrides)
    theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    vision = load(folder).vision
    assert vision is not None
    images = [tiles(size) for size in SIZES]
    encoded = vision.encode([pixels for pixels, _, _ in images], [tiling for _, tiling, _ in images])
    for (width, height), (pixels, tiling, count), ours in zip(SIZES, images, encoded, strict=True):
        features = theirs.model.get_image_features(pixels[None], torch.tensor([[height, width]]))
        torch.testing.assert_close(ours, features.pooler_output[0], atol=1e-4, rtol=0)
        vision.check(tuple(pixels.shape), count, tiling)
        assert len(ours) == count
    assert encoded[0].abs().max() > 0.1


@torch.inference_mode()
@pytest.mark.usefixtures("kernels")
def test_llava_next_sees_whole_pictures_as_transformers(tmp_path: Path) -> None:
    folder = make_llava_next(tmp_path)
    theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    theirs.model.config.image_grid_pinpoints = [[0, 0]]  # no tiles but the first
    vision = load(folder).vision
    assert vision is not None
    processor = next_processor({**NEXT, "image_grid_pinpoints": PINPOINTS}).within(ImageBudget(low_detail=True))
    images = []
    for size in SIZES:
        pixels, placeholders = processor.prepare(DecodedImage.whole(noise(*size)))
        assert placeholders.tiling is None
        vision.check(pixels.shape, placeholders.num_tokens)
        images.append(torch.from_numpy(of_levels(pixels, processor.levels)))
    cut, tiling, _ = tiles(SIZES[0])
    encoded = vision.encode([*images, cut], [None] * len(images) + [tiling])
    for (width, height), pixels, ours in zip(SIZES, images, encoded[:-1], strict=True):
        features = theirs.model.get_image_features(pixels[None], torch.tensor([[height, width]])).pooler_output[0]
        torch.testing.assert_close(ours, features, atol=1e-4, rtol=0)
    torch.testing.assert_close(encoded[0][:16], encoded[-1][:16], atol=1e-5, rtol=0)
    torch.testing.assert_close(encoded[-1], vision.encode([cut], [tiling])[0], atol=1e-5, rtol=0)


@torch.inference_mode()
@pytest.mark.usefixtures("kernels")
def test_rows_of_tiles_end_in_newlines(tmp_path: Path) -> None:
    model = load(make_llava_next(tmp_path))
    vision: Any = model.vision
    pixels = torch.randn(7, 3, 16, 16)
    [image] = vision.encode([pixels], [Tiling(2, 3, 4, 12)])
    alone = [vision.encode([pixels[tile : tile + 1]], [None])[0][:16].view(4, 4, -1) for tile in range(7)]
    torch.testing.assert_close(image[:16], alone[0].flatten(0, 1), atol=1e-5, rtol=0)
    rows = image[16:].view(4, 13, -1)
    # The middle rows of both rows of tiles: the last two of the upper ones, the first two of the lower ones.
    upper, lower = torch.cat(alone[1:4], 1)[2:], torch.cat(alone[4:7], 1)[:2]
    torch.testing.assert_close(rows[:, :12], torch.cat((upper, lower)), atol=1e-5, rtol=0)
    newline = vision.image_newline.weight
    assert newline.abs().max() > 0.1
    assert torch.equal(rows[:, 12], newline.expand(4, -1))


@pytest.mark.parametrize(
    ("count", "tiling", "message"),
    [
        (3, None, "do not form rows and columns"),
        (1, None, "17 embeddings and has 52"),
        (3, Tiling(2, 2, 8, 8), "do not form rows and columns"),
        (3, Tiling(1, 2, 5, 8), "more than its tiles"),
        (3, Tiling(1, 2, 4, 9), "more than its tiles"),
        (3, Tiling(1, 2, -1, 8), "more than its tiles"),
        (3, Tiling(2, 1, 8, 4), "56 embeddings and has 52"),
    ],
    ids=str,
)
def test_tiles_that_make_no_picture_are_refused(
    tmp_path: Path, count: int, tiling: Tiling | None, message: str
) -> None:
    vision = load(make_llava_next(tmp_path)).vision
    assert vision is not None
    vision.check((3, 3, 16, 16), 52, Tiling(1, 2, 4, 8))
    with pytest.raises(InvalidImageError, match=message):
        vision.check((count, 3, 16, 16), 52, tiling)


def test_llava_next_with_class_tokens_is_rejected(tmp_path: Path) -> None:
    folder = make_llava_next(tmp_path)
    change_config(folder, vision_feature_select_strategy="full")
    with pytest.raises(UnsupportedModelError, match="'full' keeps a class token"):
        load(folder)


def test_a_missing_newline_is_named(tmp_path: Path) -> None:
    folder = make_llava_next(tmp_path)
    rename_tensors(folder, lambda name: None if "newline" in name else name)
    with pytest.raises(MissingWeightsError, match="image_newline"):
        load(folder)


@pytest.mark.parametrize("side", [1, 2, 5, 7, 13, 26, 27, 32, 70])
def test_patches_take_the_positions_that_transformers_gives_them(side: int) -> None:
    config = Idefics3VisionConfig(hidden_size=1, image_size=side, patch_size=1, num_attention_heads=1)
    theirs = Idefics3VisionEmbeddings(config)
    torch.nn.init.zeros_(theirs.patch_embedding.weight)
    assert theirs.patch_embedding.bias is not None
    torch.nn.init.zeros_(theirs.patch_embedding.bias)
    theirs.position_embedding.weight.data = torch.arange(side**2, dtype=torch.float32)[:, None]
    for down, across in ((side, side), (1, 1), (2, 3), (side + 3, side), (26, 26), (2 * side, 3 * side)):
        mask = torch.ones(1, down, across, dtype=torch.bool)
        expected = theirs(torch.zeros(1, 3, down, across), patch_attention_mask=mask).flatten()
        assert patch_positions(down, across, side).tolist() == expected.tolist()


SPLIT_VARIANTS: dict[str, tuple[dict[str, Any], int]] = {
    "tiles of the table's size": ({}, 16),
    "larger tiles": ({}, 24),
    "smaller tiles": ({"vision": {"image_size": 28}}, 16),
    "nine patches to one": ({"vision": {"image_size": 27, "patch_size": 3}, "scale_factor": 3}, 27),
    "left-over pixels": ({"vision": {"image_size": 18}}, 18),
    "SmolVLM": ({"family": "SmolVLM", "vision": {"hidden_act": "gelu", "num_channels": 3}}, 16),
}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("overrides", "tile"), SPLIT_VARIANTS.values(), ids=SPLIT_VARIANTS)
@torch.inference_mode()
def test_embeddings_of_tiles_equal_those_of_transformers(tmp_path: Path, overrides: dict[str, Any], tile: int) -> None:
    folder = make_idefics3(tmp_path, **overrides)
    theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    vision = load(folder).vision
    assert vision is not None
    generator = torch.Generator().manual_seed(1)
    # The last image has more tiles than go through the tower together.
    images = [torch.randn(count, 3, tile, tile, generator=generator) for count in (1, 5, 19)]
    encoded = vision.encode(images)
    for pixels, ours in zip(images, encoded, strict=True):
        features = torch.cat(theirs.model.get_image_features(pixels[None]).pooler_output)
        assert features.abs().max() > 0.1
        torch.testing.assert_close(ours, features, atol=1e-4, rtol=1e-4)
        vision.check(tuple(pixels.shape), len(features))
    assert vision.encode([]) == []


def test_prefixed_names_mean_the_same_weights(tmp_path: Path) -> None:
    folders = [make_idefics3(tmp_path / name) for name in ("with", "without")]
    rename_tensors(folders[1], lambda name: name.removeprefix("model."))
    models = [load(folder) for folder in folders]
    pixels = [torch.ones(2, 3, 16, 16)]
    first, second = (model.vision.encode(pixels)[0] for model in models if model.vision is not None)
    assert torch.equal(first, second)
    ids = torch.arange(9)
    assert torch.equal(*(model.language_model.embed(ids) for model in models))


@pytest.mark.parametrize("shape", [(1, 3, 16, 24), (1, 4, 16, 16), (3, 16, 16), (1, 3, 2, 2), (1, 3, 12, 12)], ids=str)
def test_pixels_that_are_no_tiles_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    vision = load(make_idefics3(tmp_path)).vision
    assert vision is not None
    with pytest.raises(
        InvalidImageError, match="square tiles with 3 channels and whole squares of 2 x 2 patches of 4 pixels"
    ):
        vision.check(shape, 4)
    with pytest.raises(InvalidImageError, match="8 embeddings and has 4"):
        vision.check((2, 3, 16, 16), 4)


SMALL = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 1, "num_attention_heads": 4}
"""transformers makes the whole model before it is refused."""


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"vision_config": {**SMALL, "model_type": "clip_vision_model"}}, "clip_vision_model"),
        ({"vision_config": {**SMALL, "hidden_act": "mish"}}, "mish"),
        ({"text_config": {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 4}}, "gpt2"),
    ],
)
def test_unimplemented_parts_are_rejected_by_name(tmp_path: Path, fields: dict[str, Any], word: str) -> None:
    folder = make_idefics3(tmp_path)
    change_config(folder, **fields)
    with pytest.raises(UnsupportedModelError, match=word):
        load(folder)


def test_towers_named_as_in_the_first_checkpoints_load(tmp_path: Path) -> None:
    folder = make_idefics3(tmp_path)
    config = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4}
    change_config(folder, vision_config={**config, "image_size": 16, "patch_size": 4, "model_type": "idefics3"})
    assert load(folder).vision is not None


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("make", [make_llava_next, make_idefics3])
@torch.inference_mode()
def test_quantized_copies_see_as_quantized_at_load(tmp_path: Path, make: Callable[..., Path]) -> None:
    folder = make(tmp_path / "plain", text={"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8})
    config = QuantizationConfig(scheme="int8", vision=True)
    save_quantized(folder, tmp_path / "saved", config)
    pixels, tiling, _ = tiles((40, 30))
    saved, at_load = (
        load(place, quantization=choice).vision for place, choice in ((tmp_path / "saved", None), (folder, config))
    )
    assert saved is not None
    assert at_load is not None
    assert torch.equal(saved.encode([pixels], [tiling])[0], at_load.encode([pixels], [tiling])[0])
