"""Images in tiles against transformers' own processors: LLaVA-NeXT's, Idefics3's and SmolVLM's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from tests.media.images_for_tests import encoded, noise, photo
from tests.normalized import of_levels, processed
from vlmserve.errors import InvalidRequestError, ModelLoadError, UnsupportedModelError
from vlmserve.media.budget import ImageBudget
from vlmserve.media.cache import ImageCache
from vlmserve.media.images import DecodedImage, decode_image
from vlmserve.media.processor import Placeholders
from vlmserve.media.sources import prepare_image
from vlmserve.media.tiles import AnyResolutionProcessor, SplitProcessor, SplitWords
from vlmserve.settings.config import MediaConfig
from vlmserve.types import Tiling

SIZES = [
    (24, 24), (25, 39), (63, 65), (200, 90), (90, 200), (5, 3), (7, 300), (1000, 8), (16, 32), (48, 16), (64, 64),
    (47, 188), (188, 47), (1, 1), (1, 97), (131, 1), (49, 48), (100, 99), (33, 11), (16, 16), (17, 16),
]  # fmt: skip

TILE = 16
NEXT: dict[str, Any] = {
    "size": {"shortest_edge": TILE},
    "crop_size": {"height": TILE, "width": TILE},
    "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32], [48, 16], [16, 48]],
}
NEXT_CONFIG: dict[str, Any] = {
    "model_type": "llava_next",
    "vision_config": {"model_type": "clip_vision_model", "image_size": TILE, "patch_size": 4},
}
NEXT_SETTINGS: dict[str, dict[str, Any]] = {
    "published": NEXT,
    "plain edges": {**NEXT, "size": TILE, "crop_size": TILE, "resample": 2},
    "larger, then cropped": {**NEXT, "size": {"shortest_edge": 20}, "image_mean": [0.1, 0.2, 0.3]},
    "one resolution": {**NEXT, "image_grid_pinpoints": [[48, 32]]},
    "whole images first": {**NEXT, "image_grid_pinpoints": [[48, 48], [16, 16], [16, 96], [32, 32]]},
    "raw": {**NEXT, "do_normalize": False, "do_rescale": False},
    "never resized": {**NEXT, "do_resize": False},
    "never cropped": {**NEXT, "do_center_crop": False},
}


def next_processor(settings: dict[str, Any], **options: Any) -> AnyResolutionProcessor:
    return AnyResolutionProcessor(NEXT_CONFIG, settings, **options)


class Counter(LlavaNextProcessor):
    """Only what counts placeholders."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.image_processor = LlavaNextImageProcessorPil(**settings)
        self.patch_size, self.num_additional_image_tokens = 4, 1
        self.vision_feature_select_strategy = "default"
        self.image_token = "#"


@pytest.mark.parametrize("settings", NEXT_SETTINGS.values(), ids=NEXT_SETTINGS)
def test_any_resolution_pixels_and_placeholders_equal_transformers(settings: dict[str, Any]) -> None:
    ours, theirs = next_processor(settings), LlavaNextImageProcessorPil(**settings)
    counts = set()
    for size in SIZES:
        image = noise(*size)
        expected = theirs(images=image, return_tensors="np")
        pixels = processed(ours, DecodedImage.whole(image))
        np.testing.assert_allclose(pixels, expected["pixel_values"][0], rtol=0, atol=1e-6)
        placeholders = ours.placeholders(pixels, size)
        assert placeholders.num_tokens == len(Counter(settings).replace_image_token(expected, 0))
        assert placeholders.tiling is not None
        counts.add(placeholders.num_tokens)
    assert len(counts) > 5


def test_any_resolution_defaults_equal_transformers() -> None:
    tower = {"model_type": "clip_vision_model", "image_size": 224, "patch_size": 56}
    settings = {"image_grid_pinpoints": [[224, 448], [448, 224]]}
    ours = AnyResolutionProcessor({"vision_config": tower}, settings)
    theirs = LlavaNextImageProcessorPil(**settings)(images=noise(90, 60), return_tensors="np")["pixel_values"]
    np.testing.assert_allclose(processed(ours, DecodedImage.whole(noise(90, 60))), theirs[0], rtol=0, atol=1e-6)
    ours = AnyResolutionProcessor({"model_type": "llava_next"}, {"size": 336, "crop_size": 336})
    for width, height in ((1000, 600), (600, 1000), (700, 690), (3000, 400), (300, 2000)):
        pixels, placeholders = ours.prepare(DecodedImage.whole(noise(width, height)))
        tiling = placeholders.tiling
        assert tiling is not None
        assert [336 * tiling.rows, 336 * tiling.columns] in LlavaNextImageProcessorPil().image_grid_pinpoints
        assert len(pixels) == 1 + tiling.rows * tiling.columns


def test_an_image_covers_the_middle_of_its_tiles() -> None:
    processor = next_processor(NEXT)
    pixels = processed(processor, DecodedImage.whole(noise(40, 30)))
    # 32 x 24 of the 32 x 32 pixels of 2 x 2 tiles, which have 8 x 8 embeddings.
    assert processor.placeholders(pixels, (40, 30)) == Placeholders(16 + 6 * 9, tiling=Tiling(2, 2, 6, 8))


@pytest.mark.parametrize("settings", NEXT_SETTINGS.values(), ids=NEXT_SETTINGS)
def test_low_detail_keeps_only_the_first_tile(settings: dict[str, Any]) -> None:
    processor, theirs = next_processor(settings), LlavaNextImageProcessorPil(**settings)
    low = processor.within(ImageBudget(low_detail=True))
    for size in SIZES[:6]:
        pixels, placeholders = low.prepare(DecodedImage.whole(noise(*size)))
        expected = theirs(images=noise(*size), return_tensors="np")["pixel_values"][0]
        np.testing.assert_allclose(of_levels(pixels, low.levels), expected[:1], rtol=0, atol=1e-6)
        assert placeholders == Placeholders(16 + 1)
    assert low.fingerprint != processor.fingerprint
    assert processor.within(ImageBudget()) is processor
    assert low.within(ImageBudget(low_detail=True)) is low
    assert low.reduction((640, 480)) >= processor.reduction((640, 480))
    with pytest.raises(InvalidRequestError, match="max_pixels is 100, but for this model an image has at least 256"):
        processor.within(ImageBudget(max_pixels=100, low_detail=True))


SPLIT_SETTINGS: dict[str, dict[str, Any]] = {
    "published": {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 16}},
    "other tiles": {"size": {"longest_edge": 50}, "max_image_size": {"longest_edge": 24}, "resample": 2},
    "an odd edge": {"size": {"longest_edge": 33}, "max_image_size": {"longest_edge": 16}},
    "first of one size": {"size": {"height": 40, "width": 30}, "max_image_size": {"longest_edge": 16}},
    "its own size": {"do_resize": False, "max_image_size": {"longest_edge": 32}},
    "whole": {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 16}, "do_image_splitting": False},
    "whole, its own size": {"do_resize": False, "do_image_splitting": False, "max_image_size": {"longest_edge": 16}},
    "raw": {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}, "do_normalize": False},
    "another mean": {
        "size": {"longest_edge": 32},
        "max_image_size": {"longest_edge": 16},
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.5, 0.6, 0.7],
        "rescale_factor": 1 / 127.5,
    },
}
IMAGE = ord("#")
WORDS = SplitWords(lambda text: list(map(ord, text)), "#", IMAGE, "@", "W")


def split_processor(settings: dict[str, Any], words: SplitWords = WORDS, **options: Any) -> SplitProcessor:
    return SplitProcessor({"vision_config": {"patch_size": 4}, "scale_factor": 2}, settings, words, **options)


def text_of(image: Placeholders) -> str:
    """The text that an image becomes, whose tokens are characters here."""
    letters = ["#"] * image.num_tokens
    for place, letter in image.text:
        letters[place] = chr(letter)
    return "".join(letters)


def text_by_transformers(processed: Any, tile_tokens: int) -> str:
    rows, columns = processed["rows"][0][0], processed["cols"][0][0]
    return str(get_image_prompt_string(rows, columns, tile_tokens, WORDS.around, WORDS.image_token, WORDS.whole))


@pytest.mark.parametrize("oracle", [Idefics3ImageProcessorPil, SmolVLMImageProcessorPil])
@pytest.mark.parametrize("settings", SPLIT_SETTINGS.values(), ids=SPLIT_SETTINGS)
def test_split_image_pixels_and_words_equal_transformers(settings: dict[str, Any], oracle: type[Any]) -> None:
    ours, theirs = split_processor(settings), oracle(**settings)
    tile_tokens = (settings["max_image_size"]["longest_edge"] // 8) ** 2
    for size in SIZES:
        image = noise(*size)
        expected = theirs(images=image, return_tensors="np", return_row_col_info=True)
        pixels = processed(ours, DecodedImage.whole(image))
        np.testing.assert_allclose(pixels, expected["pixel_values"][0], rtol=0, atol=1e-6)
        assert expected["pixel_attention_mask"].all(), "no tile has padding, so the tower need not know of any"
        assert text_of(ours.placeholders(pixels, size)) == text_by_transformers(expected, tile_tokens)


def test_an_image_of_low_detail_is_not_cut() -> None:
    settings = {**SPLIT_SETTINGS["published"], "do_image_splitting": True}
    processor = split_processor(settings)
    low = processor.within(ImageBudget(low_detail=True))
    uncut = split_processor({**settings, "do_image_splitting": False})
    image = DecodedImage.whole(noise(90, 20))
    (pixels, placeholders), (expected, expected_placeholders) = low.prepare(image), uncut.prepare(image)
    np.testing.assert_array_equal(pixels, expected)
    assert placeholders == expected_placeholders
    assert len(pixels) < len(processor.prepare(image)[0])
    assert low.fingerprint == uncut.fingerprint != processor.fingerprint
    assert processor.within(ImageBudget()) is processor
    assert uncut.within(ImageBudget(low_detail=True)) is uncut


def test_split_image_defaults_equal_transformers() -> None:
    ours = SplitProcessor({"vision_config": {"patch_size": 14}, "scale_factor": 2}, {}, WORDS)
    theirs = Idefics3ImageProcessorPil()(images=noise(90, 20), return_tensors="np", return_row_col_info=True)
    pixels = processed(ours, DecodedImage.whole(noise(90, 20)))
    np.testing.assert_allclose(pixels, theirs["pixel_values"][0], rtol=0, atol=1e-6)
    assert text_of(ours.placeholders(pixels, (90, 20))) == text_by_transformers(theirs, 169)


def test_no_image_is_larger_than_the_largest_edge() -> None:
    settings = {"size": {"longest_edge": 5000}, "max_image_size": {"longest_edge": 1024}}
    ours = split_processor(settings)
    theirs = Idefics3ImageProcessorPil(**settings)(images=noise(90, 3), return_tensors="np")["pixel_values"]
    np.testing.assert_allclose(processed(ours, DecodedImage.whole(noise(90, 3))), theirs[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", ["RGBA", "L", "P", "CMYK"])
def test_image_of_any_mode_equals_transformers(mode: str) -> None:
    image = noise(40, 25, mode)
    for ours, theirs in (
        (next_processor(NEXT), LlavaNextImageProcessorPil(**NEXT)),
        (split_processor(SPLIT_SETTINGS["published"]), Idefics3ImageProcessorPil(**SPLIT_SETTINGS["published"])),
    ):
        expected = theirs(images=image, return_tensors="np")["pixel_values"][0]
        np.testing.assert_allclose(processed(ours, DecodedImage.whole(image)), expected, rtol=0, atol=1e-6)


def test_large_jpegs_are_downscaled_unless_exact() -> None:
    data = encoded(photo(1600, 1200), "JPEG", quality=95)
    for make in (
        lambda exact: next_processor(NEXT, exact_pixels=exact),
        lambda exact: split_processor(SPLIT_SETTINGS["published"], exact_pixels=exact),
    ):
        fast, exact = make(False), make(True)
        reduced = decode_image(data, MediaConfig(), fast.reduction)
        whole = decode_image(data, MediaConfig(), exact.reduction)
        assert reduced.is_reduced
        assert not whole.is_reduced
        pixels = [processed(processor, image) for processor, image in ((fast, reduced), (exact, whole))]
        assert pixels[0].shape == pixels[1].shape
        assert 0 < np.abs(pixels[0] - pixels[1]).mean() < 0.03
        assert fast.placeholders(pixels[0], reduced.size) == exact.placeholders(pixels[1], whole.size)
    # Images whose own size counts are decoded in full.
    own = split_processor(SPLIT_SETTINGS["its own size"])
    assert own.reduction((4000, 3000)) == 1


def test_whatever_changes_pixels_changes_the_fingerprint() -> None:
    changes: list[dict[str, Any]] = [
        {}, {"image_grid_pinpoints": [[16, 32]]}, {"resample": 2}, {"do_normalize": False}, {"image_mean": [0, 0, 0]},
        {"size": {"shortest_edge": 20}}, {"do_resize": False}, {"do_rescale": False},
    ]  # fmt: skip
    fingerprints = [next_processor({**NEXT, **change}).fingerprint for change in changes]
    fingerprints.append(next_processor(NEXT, exact_pixels=True).fingerprint)
    low = ImageBudget(low_detail=True)
    fingerprints += [next_processor({**NEXT, **change}).within(low).fingerprint for change in ({}, {"resample": 2})]
    base = SPLIT_SETTINGS["published"]
    changes = [
        {}, {"size": {"longest_edge": 32}}, {"max_image_size": {"longest_edge": 32}}, {"do_image_splitting": False},
        {"resample": 2}, {"do_resize": False}, {"do_rescale": False}, {"do_normalize": False}, {"image_std": 0.4},
    ]  # fmt: skip
    fingerprints += [split_processor({**base, **change}).fingerprint for change in changes]
    fingerprints.append(split_processor(base, exact_pixels=True).fingerprint)
    assert len(set(fingerprints)) == len(fingerprints)


def test_equal_files_with_other_settings_are_other_images() -> None:
    data, cache = encoded(noise(40, 30)), ImageCache(2**20)
    split, whole = split_processor(SPLIT_SETTINGS["published"]), split_processor(SPLIT_SETTINGS["whole"])
    images = [prepare_image(data, processor, MediaConfig(), cache) for processor in (split, whole, split)]
    assert images[0] is images[2]
    assert images[0].key != images[1].key
    assert [image.num_embeddings for image in images[:2]] == [4 * 13, 4]
    assert images[0].num_embeddings + len(images[0].text) == images[0].num_tokens


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_grid_pinpoints": [[16, 40]]}, "whole tiles of 16"),
        ({"image_grid_pinpoints": []}, "heights and widths"),
        ({"image_grid_pinpoints": [[16]]}, "heights and widths"),
        ({"crop_size": {"height": 16, "width": 20}}, "tiles are square"),
        ({"size": {"shortest_edge": 20}, "do_center_crop": False}, "20 x 20"),
    ],
)
def test_unimplemented_any_resolution_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        next_processor({**NEXT, **settings})


def test_a_class_token_in_each_tile_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="do not form a square"):
        AnyResolutionProcessor({**NEXT_CONFIG, "vision_feature_select_strategy": "full"}, NEXT)


def test_files_that_contradict_each_other_are_refused() -> None:
    base = SPLIT_SETTINGS["published"]
    with pytest.raises(ModelLoadError, match="image_seq_len"):
        split_processor(base, tile_tokens=169)
    assert split_processor(base, tile_tokens=4)
    with pytest.raises(ModelLoadError, match="max_image_size"):
        split_processor({**base, "max_image_size": {"longest_edge": 20}})
    with pytest.raises(UnsupportedModelError, match="longest_edge"):
        split_processor({**base, "size": {"shortest_edge": 20}})
