from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from tests.media.images_for_tests import (
    MadeWhenAsked,
    encoded,
    exif_rotated,
    noise,
    orientation_exif,
    palette_with_transparency,
    photo,
)
from tests.normalized import processed
from vlmserve.errors import InvalidImageError, UnsupportedModelError
from vlmserve.media import processor as processor_module
from vlmserve.media.images import DecodedImage, decode_image
from vlmserve.media.processor import FixedSizeProcessor
from vlmserve.settings.config import MediaConfig

ORACLES: dict[str, Any] = {
    "Blip": BlipImageProcessorPil,
    "CLIP": CLIPImageProcessorPil,
    "Llava": LlavaImageProcessorPil,
    "Siglip": SiglipImageProcessorPil,
    "ViT": ViTImageProcessorPil,
}
EXACT = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
CROPPED = {"size": {"shortest_edge": 30}, "crop_size": {"height": 28, "width": 28}}
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("CLIP", EXACT),
    ("CLIP", {**CROPPED, "resample": 2, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.9, 0.8, 0.7]}),
    ("CLIP", {"size": {"height": 28, "width": 28}, "do_center_crop": False}),
    ("CLIP", {"do_resize": False, "crop_size": {"height": 28, "width": 28}}),
    ("CLIP", {**CROPPED, "do_normalize": False}),
    ("CLIP", {**CROPPED, "do_rescale": False}),
    ("CLIP", {**CROPPED, "rescale_factor": 1 / 127.5}),
    ("Llava", {**CROPPED, "do_pad": True}),
    ("Llava", {**CROPPED, "do_pad": False}),
    ("Siglip", {"size": {"height": 28, "width": 28}}),
    ("ViT", {"size": {"height": 28, "width": 28}, "do_convert_rgb": True}),
    ("Blip", {"size": {"height": 28, "width": 28}}),
]
FILES = {
    "wide": encoded(noise(61, 37)),
    "tall": encoded(noise(13, 53)),
    "small": encoded(noise(5, 9)),
    "exact": encoded(noise(28, 28)),
    "one pixel wide": encoded(noise(1, 47)),
    "one pixel high": encoded(noise(47, 1)),
    "one pixel": encoded(noise(1, 1)),
    "gray": encoded(noise(31, 40, "L")),
    "black and white": encoded(noise(31, 40, "1")),
    "gray with alpha": encoded(noise(31, 40, "LA")),
    "palette": encoded(noise(31, 40, "P")),
    "palette with transparency": palette_with_transparency(),
    "alpha": encoded(noise(33, 21, "RGBA")),
    "CMYK": encoded(noise(33, 21, "CMYK"), "JPEG"),
    "GIF": encoded(noise(33, 21), "GIF"),
    "WebP": encoded(noise(33, 21, "RGBA"), "WEBP", lossless=True),
    "BMP": encoded(noise(33, 21), "BMP"),
    "TIFF": encoded(noise(33, 21), "TIFF"),
    **{f"rotated {orientation}": exif_rotated(40, 25, orientation) for orientation in range(1, 9)},
}
VISION = {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14}
CONFIG = {"model_type": "llava", "vision_config": VISION}


SIZES = ("wide", "tall", "small", "exact", "one pixel wide", "one pixel high", "one pixel", "rotated 6")
"""Files whose sizes or orientations differ. The others differ in how they are decoded, which no setting changes."""
PIXELS = [(*one, name) for one in SETTINGS for name in FILES if name in SIZES or one in (SETTINGS[0], SETTINGS[3])]


@pytest.mark.parametrize(("family", "settings", "name"), PIXELS)
def test_pixels_are_those_of_transformers(family: str, settings: dict[str, Any], name: str) -> None:
    processor = FixedSizeProcessor(CONFIG, {"image_processor_type": f"{family}ImageProcessor", **settings})
    ours = processed(processor, decode_image(FILES[name], MediaConfig()))
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(FILES[name])))
    theirs = ORACLES[family](**settings)(images=upright, return_tensors="np")["pixel_values"]
    assert ours.dtype == np.float32
    assert ours.shape == (1, 3, 28, 28)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ORACLES)
def test_missing_settings_have_the_defaults_of_transformers(family: str) -> None:
    config: dict[str, Any] = {"vision_config": {"image_size": 224, "patch_size": 32}}
    if family == "Blip":
        config = {"model_type": "blip"}
    processor = FixedSizeProcessor(config, {"image_processor_type": f"{family}ImageProcessorFast"})
    ours = processed(processor, DecodedImage.whole(noise(80, 60)))
    theirs = ORACLES[family]()(images=noise(80, 60), return_tensors="np")["pixel_values"]
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("width", "height"), [(1, 9_000), (9_000, 1), (3, 12_000), (3_000, 2)])
@pytest.mark.parametrize("edge", [28, 33])
def test_extremely_long_images_are_cropped_without_upscaling(
    monkeypatch: pytest.MonkeyPatch, width: int, height: int, edge: int
) -> None:
    monkeypatch.setattr(processor_module, "MAX_INTERMEDIATE_PIXELS", 2_000_000)  # more than the last one becomes
    settings = {"size": {"shortest_edge": edge}, "crop_size": {"height": 28, "width": 28}}
    processor = FixedSizeProcessor(CONFIG, {"image_processor_type": "CLIPImageProcessor", **settings})
    image = noise(width, height)
    theirs = CLIPImageProcessorPil(**settings)(images=image, return_tensors="np")["pixel_values"]
    one_level = 1 / 255 / 0.26
    np.testing.assert_allclose(processed(processor, DecodedImage.whole(image)), theirs, rtol=0, atol=1.1 * one_level)


@pytest.mark.parametrize("size", [(1, 5_000_000), (5_000_000, 1)])
@pytest.mark.parametrize("do_pad", [True, False])
def test_no_allowed_image_needs_more_memory_than_itself(size: tuple[int, int], do_pad: bool) -> None:
    settings = {"image_processor_type": "LlavaImageProcessor", "do_pad": do_pad, **CROPPED}
    image = Image.new("RGB", size, (255, 0, 0))
    pixels = processed(FixedSizeProcessor(CONFIG, settings), DecodedImage.whole(image))
    assert pixels.shape == (1, 3, 28, 28)
    assert np.ptp(pixels[0, 0]) == 0 or do_pad


PHOTOS = MadeWhenAsked(
    {
        "divisible": lambda: encoded(photo(480, 640), "JPEG"),
        "odd": lambda: encoded(photo(487, 393), "JPEG"),
        "gray": lambda: encoded(photo(487, 393, "L"), "JPEG"),
        "CMYK": lambda: encoded(photo(487, 393, "CMYK"), "JPEG"),
        "progressive": lambda: encoded(photo(487, 393), "JPEG", progressive=True),
        "no subsampling": lambda: encoded(photo(487, 393), "JPEG", subsampling=0),
        **{
            f"rotated {number}": lambda number=number: encoded(photo(487, 395), "JPEG", exif=orientation_exif(number))
            for number in range(1, 9)
        },
    }
)


REDUCED = [
    (*one, name)
    for one in [
        *SETTINGS,
        ("CLIP", {"size": {"height": 40, "width": 32}, "crop_size": 28}),
        ("Llava", {"do_pad": True, **EXACT}),
    ]
    for name in PHOTOS
    if name in ("divisible", "odd", "rotated 6") or one == SETTINGS[0]
]


@pytest.mark.parametrize(("family", "settings", "name"), REDUCED)
def test_downscaled_photo_is_close_to_transformers(family: str, settings: dict[str, Any], name: str) -> None:
    settings = settings | {"do_normalize": False, "do_rescale": False}
    processor = FixedSizeProcessor(CONFIG, {"image_processor_type": f"{family}ImageProcessor", **settings})
    image = decode_image(PHOTOS[name], MediaConfig(), processor.reduction)
    assert image.is_reduced == settings.get("do_resize", True)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(PHOTOS[name])))
    theirs = ORACLES[family](**settings)(images=upright, return_tensors="np")["pixel_values"]
    difference = np.abs(processed(processor, image) - theirs)
    # Beside padding, the row of which a part is the image is all image.
    mean, extreme = (1.5, 6) if settings.get("do_pad") else (0.8, 3)
    assert difference.mean() < mean
    assert np.percentile(difference, 95) < extreme


def test_only_much_reduced_images_are_downscaled() -> None:
    processor = FixedSizeProcessor(CONFIG, {"size": {"shortest_edge": 28}, "crop_size": 28})

    def decoded_size(width: int, height: int, format: str = "JPEG") -> tuple[int, int]:
        data = encoded(noise(width, height), format)
        return decode_image(data, MediaConfig(), processor.reduction).image.size

    assert decoded_size(300, 4 * 28 - 1) == (300, 111)
    assert decoded_size(300, 4 * 28) == (150, 56)
    assert decoded_size(8 * 28, 301) == (56, 76)
    assert decoded_size(20 * 28, 20 * 28) == (70, 70)
    assert decoded_size(300, 300, "PNG") == (300, 300)
    assert decoded_size(5, 3) == (5, 3)


def test_exact_pixels_equal_transformers_for_large_photos() -> None:
    processor = FixedSizeProcessor(CONFIG, {"image_processor_type": "CLIPImageProcessor", **EXACT}, exact_pixels=True)
    image = decode_image(PHOTOS["odd"], MediaConfig(), processor.reduction)
    full = Image.open(io.BytesIO(PHOTOS["odd"]))
    theirs = CLIPImageProcessorPil(**EXACT)(images=full, return_tensors="np")["pixel_values"]
    np.testing.assert_allclose(processed(processor, image), theirs, rtol=0, atol=1e-6)


def test_a_large_photo_that_is_truncated_is_refused() -> None:
    processor = FixedSizeProcessor(CONFIG, {"size": {"shortest_edge": 28}, "crop_size": 28})
    with pytest.raises(InvalidImageError, match="truncated"):
        decode_image(PHOTOS["odd"][:-2000], MediaConfig(), processor.reduction)


def test_sixteen_bit_gray_keeps_its_shades() -> None:
    levels = np.linspace(0, 65535, 28 * 28).reshape(28, 28).astype(np.uint16)
    settings = {
        "image_processor_type": "CLIPImageProcessor",
        "do_normalize": False,
        "do_resize": False,
        "crop_size": 28,
    }
    pixels = processed(FixedSizeProcessor(CONFIG, settings), DecodedImage.whole(Image.fromarray(levels)))
    np.testing.assert_allclose(pixels[0], np.repeat(levels[None] / 65535, 3, axis=0), atol=1 / 255)


@pytest.mark.parametrize(
    ("vision", "strategy", "expected"),
    [
        ({"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}, "default", 576),
        ({"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}, "full", 577),
        ({"model_type": "clip_vision_model", "image_size": 336}, "default", 100),
        ({"model_type": "clip_vision_model"}, "default", 49),
        ({"model_type": "siglip_vision_model", "image_size": 336, "patch_size": 14}, "full", 576),
        ({}, "default", 576),
    ],
)
def test_an_image_takes_one_placeholder_for_each_embedding(
    vision: dict[str, Any], strategy: str, expected: int
) -> None:
    edge = vision.get("image_size", 224 if vision else 336)
    settings = {"size": {"height": edge, "width": edge}, "do_center_crop": False}
    config = {"model_type": "llava", "vision_config": vision, "vision_feature_select_strategy": strategy}
    assert FixedSizeProcessor(config, settings).num_tokens == expected


def test_the_fingerprint_names_every_setting_that_changes_pixels() -> None:
    def fingerprint(**settings: Any) -> bytes:
        base = {"image_processor_type": "LlavaImageProcessor", **CROPPED}
        return FixedSizeProcessor(CONFIG, {**base, **settings}).fingerprint

    exact = FixedSizeProcessor(CONFIG, {"image_processor_type": "LlavaImageProcessor", **CROPPED}, exact_pixels=True)
    variants = [
        fingerprint(),
        exact.fingerprint,
        fingerprint(size={"shortest_edge": 29}),
        fingerprint(size={"height": 28, "width": 28}),
        fingerprint(resample=2),
        fingerprint(do_center_crop=False, size={"height": 28, "width": 28}),
        fingerprint(do_pad=True),
        fingerprint(do_rescale=False),
        fingerprint(rescale_factor=1 / 127.5),
        fingerprint(do_normalize=False),
        fingerprint(image_mean=[0.1, 0.2, 0.3]),
        fingerprint(image_std=[0.1, 0.2, 0.3]),
    ]
    assert len(set(variants)) == len(variants)
    assert {len(value) for value in variants} == {32}
    assert fingerprint() == fingerprint(processor_class="LlavaProcessor", image_processor_type="CLIPImageProcessor")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_processor_type": "Qwen2VLImageProcessor"}, "supported: CLIPImageProcessor, LlavaImageProcessor"),
        ({"size": {"longest_edge": 28}}, "size"),
        ({"size": {"shortest_edge": 28}, "do_center_crop": False}, "different sizes"),
        ({"size": {"shortest_edge": 56}, "crop_size": 56}, "56 x 56"),
        ({"image_mean": [0.5], "image_std": [0.5]}, "channels"),
        ({"do_pad": True}, "do_pad"),
    ],
)
def test_what_is_not_implemented_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        FixedSizeProcessor(CONFIG, {"image_processor_type": "CLIPImageProcessor", **CROPPED, **settings})


def test_an_unknown_vision_tower_is_refused() -> None:
    config = {"vision_config": {"model_type": "pixtral", "image_size": 28}}
    with pytest.raises(UnsupportedModelError, match="pixtral"):
        FixedSizeProcessor(config, dict(CROPPED))


def test_family_counts_tokens_of_its_own_tower() -> None:
    vision = {"model_type": "own_vision_model", "image_size": 28}
    config = {"model_type": "gemma3", "mm_tokens_per_image": 9, "vision_config": vision}
    assert FixedSizeProcessor(config, dict(CROPPED)).num_tokens == 9
    vision["image_size"] = 56
    with pytest.raises(UnsupportedModelError, match="reads 56 x 56"):
        FixedSizeProcessor(config, dict(CROPPED))
