"""Image budgets of every kind of processor, against transformers' own processors with the same limits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from tests.engine.test_transformers_images import make_aya_vision, make_paddleocr, make_paligemma, make_vip_llava
from tests.media.images_for_tests import encoded, noise, photo
from tests.media.test_dynamic_resolution import KINDS as ANY_SIZE_KINDS
from tests.media.test_dynamic_resolution import SETTINGS as ANY_SIZE
from tests.media.test_dynamic_resolution import of_transformers as reference_processor
from tests.media.test_dynamic_resolution import rows_of
from tests.media.test_grids import grid_processor
from tests.media.test_rows import row_processor
from tests.media.test_tiles import (
    NEXT,
    SPLIT_SETTINGS,
    TILE,
    WORDS,
    Counter,
    next_processor,
    split_processor,
    text_of,
)  # fmt: skip
from tests.normalized import normalized
from vlmserve.errors import InvalidRequestError
from vlmserve.media import transformers_budget
from vlmserve.media.budget import ImageBudget
from vlmserve.media.cache import ImageCache
from vlmserve.media.crops import CropProcessor
from vlmserve.media.dynamic_resolution import DynamicResolutionProcessor
from vlmserve.media.images import DecodedImage, decode_image
from vlmserve.media.processor import FixedSizeProcessor, ImageProcessor
from vlmserve.media.sources import prepare_image, process_image
from vlmserve.media.transformers_budget import low_detail, settings_within
from vlmserve.media.transformers_processor import TransformersProcessor
from vlmserve.settings.config import MediaConfig
from vlmserve.types import ImageInput, ImageSize

SIZES = [(24, 24), (63, 65), (200, 90), (90, 200), (300, 40), (17, 16), (5, 3), (131, 20)]


def prepared(processor: ImageProcessor, size: tuple[int, int], budget: ImageBudget) -> ImageInput:
    """An image within a budget, which it keeps."""
    image = process_image(b"", DecodedImage.whole(noise(*size)), processor.within(budget))
    budget.check_kept(image)
    return image


def seen(image: ImageInput) -> ImageSize:
    assert image.size is not None
    return image.size


# Models that take any size


def dynamic_resolution(kind: str = "Qwen2-VL") -> DynamicResolutionProcessor:
    return DynamicResolutionProcessor.from_settings(ANY_SIZE_KINDS[kind][0])


@pytest.mark.parametrize("kind", ANY_SIZE_KINDS)
@pytest.mark.parametrize(
    ("budget", "least", "most"),
    [
        (ImageBudget(max_pixels=1000), 256, 1000),
        (ImageBudget(max_tokens=20), 256, 20 * 64),
        (ImageBudget(min_pixels=2000), 2000, 4096),
        (ImageBudget(1500, 2500, 30), 1500, 30 * 64),
        (ImageBudget(max_pixels=100, max_tokens=10**9), 100, 100),
    ],
    ids=str,
)
def test_dynamic_resolution_matches_transformers(kind: str, budget: ImageBudget, least: int, most: int) -> None:
    theirs, count = reference_processor(kind), 2 if kind == "GLM-OCR" else 1

    def by_transformers(image: Image.Image) -> Any:
        """With the largest lower bound with which it keeps the upper one."""
        for shortest in range(least, 0, -1):
            size = {"shortest_edge": count * shortest, "longest_edge": count * most}
            inputs = theirs(images=image, size=size, return_tensors="pt")
            if inputs["image_grid_thw"].prod() * 16 <= most:
                break
        return inputs

    for width, height in [(24, 24), (63, 65), (200, 90), (90, 200), (60, 40), (17, 16), (5, 3), (90, 40)]:
        image = prepared(dynamic_resolution(kind), (width, height), budget)
        expected = by_transformers(noise(width, height))
        rows, grid = rows_of(kind, torch.from_numpy(normalized(image)))
        assert grid.tolist() == expected["image_grid_thw"].tolist()
        torch.testing.assert_close(rows, expected["pixel_values"].view_as(rows), atol=1e-5, rtol=0)
        assert image.num_tokens == expected["image_grid_thw"].prod().item() // 4
        area = (4 * grid[0, 2].item(), 4 * grid[0, 1].item())
        assert seen(image) == ImageSize(width, height, *area, (0, 0, width, height), image.num_tokens)


def test_what_cannot_be_made_small_enough_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="max_tokens is 2, but an image of 400 x 20 pixels takes at"):
        prepared(dynamic_resolution(), (400, 20), ImageBudget(max_tokens=2))
    with pytest.raises(InvalidRequestError, match=r"max_pixels is 128, but .* has at least 48 x 8 for this model"):
        prepared(dynamic_resolution(), (400, 20), ImageBudget(max_pixels=128))
    with pytest.raises(InvalidRequestError, match=r"min_pixels is 2,000, but .* at most 640 pixels"):
        prepared(dynamic_resolution(), (40, 40), ImageBudget(min_pixels=2000, max_tokens=10))
    never_resized = DynamicResolutionProcessor.from_settings({**ANY_SIZE, "do_resize": False})
    with pytest.raises(InvalidRequestError, match="keep their size"):
        never_resized.within(ImageBudget(max_tokens=10))


# Models that cut images into tiles of few resolutions

PINPOINTS = NEXT["image_grid_pinpoints"]


def most_tokens(height: int, width: int) -> int:
    """Of an image that fills such a resolution: 16 embeddings of a tile, and newlines."""
    return 16 + height // TILE * 4 * (width // TILE * 4 + 1)


@pytest.mark.parametrize(
    "budget",
    [
        ImageBudget(max_pixels=1000),
        ImageBudget(max_pixels=768, max_tokens=60),
        ImageBudget(max_tokens=70),
        ImageBudget(min_pixels=768),
        ImageBudget(768, 900),
    ],
    ids=str,
)
def test_images_have_the_resolutions_that_fit(budget: ImageBudget) -> None:
    kept = [
        [height, width]
        for height, width in PINPOINTS
        if (budget.min_pixels or 0) <= height * width <= (budget.max_pixels or 10**9)
        and most_tokens(height, width) <= (budget.max_tokens or 10**9)
    ]
    assert 0 < len(kept) < len(PINPOINTS)
    settings = {**NEXT, "image_grid_pinpoints": kept}
    ours, theirs = next_processor(NEXT), LlavaNextImageProcessorPil(**settings)
    for size in SIZES:
        image = prepared(ours, size, budget)
        expected = theirs(images=noise(*size), return_tensors="np")
        np.testing.assert_allclose(normalized(image), expected["pixel_values"][0], rtol=0, atol=1e-6)
        assert image.num_tokens == len(Counter(settings).replace_image_token(expected, 0))


def test_an_image_stays_whole_where_no_tiles_fit() -> None:
    processor = next_processor(NEXT)
    low = processor.within(ImageBudget(low_detail=True))
    for budget in (ImageBudget(max_pixels=TILE**2), ImageBudget(max_tokens=17), ImageBudget(max_pixels=511)):
        assert processor.within(budget).fingerprint == low.fingerprint
        assert prepared(processor, (90, 40), budget).num_tokens == 17
    assert low.within(ImageBudget(max_tokens=17)) is low
    assert processor.within(ImageBudget(min_pixels=600, low_detail=True)).fingerprint != low.fingerprint


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (ImageBudget(max_pixels=255), "max_pixels is 255, but for this model an image has at least 256 pixels"),
        (ImageBudget(max_tokens=16), "max_tokens is 16, but for this model an image has at least 17 tokens"),
        (ImageBudget(min_pixels=1025), "min_pixels is 1,025, but for this model an image has at most 1,024 pixels"),
        (ImageBudget(min_pixels=900, max_tokens=70), "min_pixels is 900, but .* at most 768 pixels"),
        (ImageBudget(min_pixels=900, max_pixels=800), "min_pixels, 900, is more than max_pixels, 800"),
    ],
    ids=str,
)
def test_a_budget_that_no_resolution_keeps_is_refused(budget: ImageBudget, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        next_processor(NEXT).within(budget)


# Models that cut images into any number of tiles

SPLIT = SPLIT_SETTINGS["published"]


def split_by_transformers(oracle: type[Any], image: Image.Image, budget: ImageBudget) -> tuple[Any, str, int, int]:
    """Pixels and text with the longest edge of whole tiles that keeps the budget, and with the rows and columns."""
    for edge in (64, 48, 32, None):
        settings = {"do_image_splitting": False} if edge is None else {"size": {"longest_edge": edge}}
        made = oracle(**{**SPLIT, **settings})(images=image, return_tensors="np", return_row_col_info=True)
        rows, columns = made["rows"][0][0], made["cols"][0][0]
        text = get_image_prompt_string(rows, columns, 4, WORDS.around, WORDS.image_token, WORDS.whole)
        pixels = max(rows * columns, 1) * 16**2
        if pixels <= (budget.max_pixels or 10**9) and len(text) <= (budget.max_tokens or 10**9):
            break
    return made["pixel_values"][0], text, rows, columns


@pytest.mark.parametrize("oracle", [Idefics3ImageProcessorPil, SmolVLMImageProcessorPil])
@pytest.mark.parametrize(
    "budget",
    [
        ImageBudget(max_pixels=12 * 256),
        ImageBudget(max_pixels=6 * 256, max_tokens=200),
        ImageBudget(max_tokens=100),
        ImageBudget(max_tokens=60),
        ImageBudget(max_pixels=256),
    ],
    ids=str,
)
def test_images_have_as_many_tiles_as_fit(budget: ImageBudget, oracle: type[Any]) -> None:
    ours = split_processor(SPLIT)
    tiles = set()
    for size in SIZES:
        image = prepared(ours, size, budget)
        pixels, text, rows, columns = split_by_transformers(oracle, noise(*size), budget)
        np.testing.assert_allclose(normalized(image), pixels, rtol=0, atol=1e-6)
        assert text_of(image) == text
        assert (seen(image).model_width, seen(image).model_height) == (max(columns, 1) * 16, max(rows, 1) * 16)
        tiles.add((rows, columns))
    assert len(tiles) > (budget.max_pixels != 256)


def test_a_budget_without_a_single_tile_is_refused() -> None:
    processor = split_processor(SPLIT)
    least = prepared(processor, (90, 40), ImageBudget(low_detail=True)).num_tokens
    for budget, message in {
        ImageBudget(max_pixels=255): "at least 256 pixels",
        ImageBudget(max_tokens=least - 1): f"at least {least} tokens",
        ImageBudget(min_pixels=64 * 64 + 1): "at most 4,096 pixels",
    }.items():
        with pytest.raises(InvalidRequestError, match=message):
            processor.within(budget)
    assert processor.within(ImageBudget(max_tokens=least)).fingerprint != processor.fingerprint
    server = processor.within(ImageBudget(max_pixels=6 * 256))
    looser = server.within(ImageBudget(max_pixels=12 * 256, max_tokens=10**6))
    assert len(prepared(looser, (64, 64), ImageBudget()).pixels) == 5, "the server's bound stays"


def test_images_are_split_into_crops_that_fit() -> None:
    vision = {"crop_size": 20, "enc_patch_size": 4, "overlap_margin": 1, "max_crops": 6}

    def processor(most: int) -> CropProcessor:
        return CropProcessor({"config": {"vision": {**vision, "max_crops": most}}})

    for most in (400, 700, 1000, 1500, 10**6):
        for size in [(61, 30), (17, 90), (45, 44), (200, 30), (8, 3)]:
            image = prepared(processor(6), size, ImageBudget(max_pixels=most))
            candidates = [
                process_image(b"", DecodedImage.whole(noise(*size)), processor(one)) for one in range(6, 0, -1)
            ]
            fitting = [one for one in candidates if (one.pixels.shape[2] - 20) * one.pixels.shape[3] <= most]
            np.testing.assert_array_equal(image.pixels, fitting[0].pixels)
            assert image.num_tokens == 25
    for budget in (ImageBudget(max_pixels=399), ImageBudget(max_tokens=24), ImageBudget(min_pixels=10**4)):
        with pytest.raises(InvalidRequestError, match="for this model an image has at"):
            processor(6).within(budget)


# Models that take one size


def fixed(**settings: Any) -> FixedSizeProcessor:
    tower = {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 4}
    base = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 16}, "crop_size": 16}
    return FixedSizeProcessor({"model_type": "llava", "vision_config": tower}, {**base, **settings})


def test_one_size_keeps_a_budget_or_refuses_it() -> None:
    processor = fixed()
    for budget in (ImageBudget(256, 256, 16), ImageBudget(max_tokens=1000), ImageBudget(low_detail=True)):
        assert processor.within(budget) is processor
    for budget in (ImageBudget(max_pixels=255), ImageBudget(max_tokens=15), ImageBudget(min_pixels=257)):
        with pytest.raises(InvalidRequestError, match="for this model an image has at"):
            processor.within(budget)


@pytest.mark.parametrize(
    ("settings", "size", "box"),
    [
        ({}, (40, 20), (10, 0, 30, 20)),
        ({}, (20, 50), (0, 15, 20, 35)),
        ({"do_center_crop": False, "size": {"height": 16, "width": 16}}, (40, 20), (0, 0, 40, 20)),
        ({"size": {"shortest_edge": 8}}, (20, 20), (-10, -10, 30, 30)),
        ({"image_processor_type": "LlavaImageProcessor", "do_pad": True}, (40, 20), (0, -10, 40, 30)),
    ],
    ids=["wide", "high", "stretched", "framed", "padded"],
)
def test_box_tells_the_visible_part_of_an_image(
    settings: dict[str, Any], size: tuple[int, int], box: tuple[float, ...]
) -> None:
    image = prepared(fixed(**settings), size, ImageBudget())
    assert seen(image) == ImageSize(*size, 16, 16, box, 16)


@pytest.mark.parametrize(
    "processor",
    [
        dynamic_resolution(), next_processor(NEXT), next_processor(NEXT).within(ImageBudget(low_detail=True)),
        next_processor({**NEXT, "size": {"shortest_edge": 20}}).within(ImageBudget(low_detail=True)),
        split_processor(SPLIT), grid_processor(), row_processor(), fixed(), fixed(size={"shortest_edge": 24}),
        fixed(image_processor_type="LlavaImageProcessor", do_pad=True),
    ],
)  # fmt: skip
def test_a_mark_is_where_the_box_says(processor: ImageProcessor) -> None:
    """What the model sees white is what is white in the image, wherever it is."""
    for size, (left, top, right, bottom) in {(100, 60): (40, 20, 60, 40), (50, 120): (12, 48, 38, 72)}.items():
        marked = Image.new("RGB", size)
        marked.paste((255, 255, 255), (left, top, right, bottom))
        image = process_image(b"", DecodedImage.whole(marked), processor)
        pixels, view = seen_pixels(image), seen(image)
        assert view.box is not None
        rows, columns = np.nonzero(pixels > (pixels.max() + pixels.min()) / 2)
        shown = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
        across = (view.box[2] - view.box[0]) / pixels.shape[1]
        down = (view.box[3] - view.box[1]) / pixels.shape[0]
        found = [view.box[index % 2] + edge * (down if index % 2 else across) for index, edge in enumerate(shown)]
        assert np.abs(np.subtract(found, (left, top, right, bottom))).max() <= max(across, down)


def seen_pixels(image: ImageInput) -> np.ndarray[Any, Any]:
    """One channel of what the model sees, as large as it says."""
    size, pixels = seen(image), image.pixels[:, 0]
    assert size.model_width is not None and size.model_height is not None  # noqa: PT018
    if len(pixels) == 1:
        assert pixels[0].shape == (size.model_height, size.model_width)
        return pixels[0]
    # The whole image is the first tile where resolutions are few, and the last one elsewhere.
    tiles = pixels[:-1] if image.text else pixels[1:]
    columns = math.ceil(size.model_width / tiles.shape[2])
    rows = len(tiles) // columns
    shape = tiles.shape[1:]
    plane = tiles.reshape(rows, columns, *shape).transpose(0, 2, 1, 3).reshape(rows * shape[0], columns * shape[1])
    top, left = (plane.shape[0] - size.model_height) // 2, (plane.shape[1] - size.model_width) // 2
    return plane[top : top + size.model_height, left : left + size.model_width]


# Models that run by transformers' code


def of_transformers(folder: Path) -> TransformersProcessor:
    config = transformers.AutoConfig.from_pretrained(folder)
    token_id = getattr(config, "image_token_id", None) or config.image_token_index
    return TransformersProcessor(folder, token_id)


@pytest.fixture(scope="module")
def paddleocr(tmp_path_factory: pytest.TempPathFactory) -> TransformersProcessor:
    return of_transformers(make_paddleocr(tmp_path_factory.mktemp("paddleocr")))


def test_transformers_processors_get_every_pixel(paddleocr: TransformersProcessor) -> None:
    decoded = decode_image(encoded(noise(400, 300), "JPEG"), MediaConfig(), paddleocr.reduction)
    assert decoded.image.size == (400, 300)


@pytest.fixture(scope="module")
def aya_vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_aya_vision(tmp_path_factory.mktemp("aya"))


@pytest.mark.parametrize(
    ("budget", "least", "most"),
    [
        (ImageBudget(max_pixels=20 * 784), 16 * 784, 20 * 784),
        (ImageBudget(max_tokens=18), 16 * 784, 18 * 784),
        (ImageBudget(min_pixels=30 * 784), 30 * 784, 60 * 784),
        (ImageBudget(20 * 784, 40 * 784, 30), 20 * 784, 30 * 784),
        (ImageBudget(max_pixels=8 * 784), 8 * 784, 8 * 784),
    ],
    ids=str,
)
def test_dynamic_resolution_by_transformers_code(
    paddleocr: TransformersProcessor, budget: ImageBudget, least: int, most: int
) -> None:
    size = {"shortest_edge": least, "longest_edge": most}
    theirs = PaddleOCRVLImageProcessorPil(size=size, patch_size=14, temporal_patch_size=1, merge_size=2)
    for width, height in [(90, 60), (300, 200), (40, 100), (200, 30)]:
        image = prepared(paddleocr, (width, height), budget)
        for step in range(8, 0, -1):
            own = {**size, "shortest_edge": least * step // 8}
            expected = theirs(images=noise(width, height), size=own, return_tensors="np")
            if expected["image_grid_thw"].prod() * 196 <= most:
                break
        np.testing.assert_array_equal(normalized(image), expected["pixel_values"])
        _, rows, columns = expected["image_grid_thw"][0]
        assert image.num_embeddings == rows * columns // 4
        assert seen(image) == ImageSize(width, height, 14 * columns, 14 * rows, (0, 0, width, height), image.num_tokens)


def test_excess_is_rejected_by_transformers_backend_too(paddleocr: TransformersProcessor) -> None:
    with pytest.raises(InvalidRequestError, match="must lie between 1 and this server's max_pixels, 47,040"):
        paddleocr.within(ImageBudget(max_pixels=47_041))


@pytest.mark.parametrize(
    "budget",
    [
        ImageBudget(max_pixels=2 * 784), ImageBudget(max_pixels=3 * 784, max_tokens=60), ImageBudget(max_tokens=25),
        ImageBudget(max_tokens=30), ImageBudget(max_pixels=784),
    ],
    ids=str,
)  # fmt: skip
def test_tiles_by_transformers_code(aya_vision: Path, budget: ImageBudget) -> None:
    processor, theirs = of_transformers(aya_vision), transformers.AutoProcessor.from_pretrained(aya_vision)
    for size in ((90, 60), (28, 28), (40, 120), (120, 40)):
        image = prepared(processor, size, budget)
        made = []
        for most in range(1, 5):
            inputs = theirs(
                text=["<image>"],
                images=[noise(*size)],
                max_patches=most,
                return_tensors="np",
                add_special_tokens=False,
            )
            tiles, tokens = len(inputs["pixel_values"]), inputs["input_ids"].shape[1]
            if budget.allows(max(1, tiles - 1) * 784, tokens):
                made.append((tokens, inputs["pixel_values"]))
        tokens, pixels = max(made, key=lambda one: one[0])
        assert image.num_tokens == tokens
        np.testing.assert_array_equal(normalized(image), pixels)
        area = (seen(image).model_width or 0) * (seen(image).model_height or 0)
        assert area == max(1, len(pixels) - 1) * 784


def test_low_detail_of_tiles_by_transformers_code(aya_vision: Path) -> None:
    processor, low = of_transformers(aya_vision), ImageBudget(low_detail=True)
    theirs = transformers.AutoProcessor.from_pretrained(aya_vision)
    for size in ((90, 60), (40, 120)):
        image = prepared(processor, size, low)
        inputs = theirs(
            text=["<image>"], images=[noise(*size)], max_patches=1, return_tensors="np", add_special_tokens=False
        )
        np.testing.assert_array_equal(normalized(image), inputs["pixel_values"])
        assert len(image.pixels) == 1
        assert image.num_tokens < prepared(processor, size, ImageBudget()).num_tokens
    fine = processor.within(ImageBudget(min_pixels=1000, low_detail=True))
    assert fine.fingerprint == processor.within(ImageBudget(min_pixels=1000)).fingerprint


def test_low_detail_by_transformers_code(paddleocr: TransformersProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    low = ImageBudget(low_detail=True)
    assert paddleocr.within(low) is paddleocr, "the checkpoint's images are smaller than that"
    monkeypatch.setattr(transformers_budget, "LOW_DETAIL_PIXELS", 20 * 784)
    for wanted, same in (
        (low, ImageBudget(max_pixels=20 * 784)),
        (ImageBudget(max_pixels=40 * 784, low_detail=True), ImageBudget(max_pixels=40 * 784)),
        (ImageBudget(min_pixels=30 * 784, low_detail=True), ImageBudget(30 * 784, 30 * 784)),
    ):
        assert paddleocr.within(wanted).fingerprint == paddleocr.within(same).fingerprint
    assert seen(prepared(paddleocr, (300, 200), low)).model_width == 14 * 10
    own = PixtralImageProcessorPil(size={"longest_edge": 96}, patch_size={"height": 16, "width": 16})
    assert low_detail(own, ImageBudget(), low) == ImageBudget(max_pixels=20 * 784)


def test_one_size_by_transformers_code(tmp_path: Path) -> None:
    for make, name, box in ((make_paligemma, "pali", (0, 0, 90, 60)), (make_vip_llava, "vip", (15, 0, 75, 60))):
        (tmp_path / name).mkdir()
        processor = of_transformers(make(tmp_path / name))
        image = prepared(processor, (90, 60), ImageBudget(max_pixels=784, max_tokens=4))
        assert seen(image) == ImageSize(90, 60, 28, 28, box, 4)
        assert processor.within(ImageBudget(low_detail=True)) is processor
        with pytest.raises(InvalidRequestError, match=r"max_tokens is 3, but .* takes at least 4 tokens"):
            prepared(processor, (90, 60), ImageBudget(max_tokens=3))
        with pytest.raises(InvalidRequestError, match=r"max_pixels is 783, but .* has at least 28 x 28"):
            prepared(processor, (90, 60), ImageBudget(max_pixels=783))


@pytest.mark.parametrize(
    "processor",
    [
        PixtralImageProcessorPil(size={"longest_edge": 96}, patch_size={"height": 16, "width": 16}),
        LlavaOnevisionImageProcessorPil(
            size={"height": 16, "width": 16}, image_grid_pinpoints=[[16, 16], [32, 32], [16, 48], [48, 48]]
        ),
        Idefics3ImageProcessorPil(**SPLIT),
    ],
    ids=["longest edges", "resolutions", "split"],
)
def test_settings_span_smallest_image_to_checkpoint_size(processor: Any) -> None:
    def num_pixels(settings: dict[str, Any]) -> int:
        return int(np.asarray(processor(images=photo(300, 290), return_tensors="np", **settings)["pixel_values"]).size)

    choices = settings_within(processor, ImageBudget(max_pixels=1))
    sizes = [num_pixels(choice) for choice in choices]
    assert len(choices) >= 4
    assert sizes == sorted(set(sizes))
    assert choices[-1] == {}


# Caches


@pytest.mark.parametrize(
    "make",
    [dynamic_resolution, lambda: next_processor(NEXT), lambda: split_processor(SPLIT), grid_processor, row_processor],
)
def test_an_image_of_two_budgets_is_two_images(make: Any) -> None:
    processor, data, cache = make(), encoded(noise(60, 50)), ImageCache(2**20)
    budgets = [ImageBudget(), ImageBudget(max_pixels=1000), ImageBudget(max_pixels=600), ImageBudget(max_tokens=70)]
    images = [prepare_image(data, processor.within(budget), MediaConfig(), cache) for budget in [*budgets, *budgets]]
    assert all(first is again for first, again in zip(images, images[len(budgets) :], strict=False))
    shapes = {(image.key, image.pixels.shape, image.num_tokens) for image in images}
    assert len({image.key for image in images}) == len(shapes)
    assert len({shape[1:] for shape in shapes}) > 1


def test_budget_enters_keys_of_transformers_backend(paddleocr: TransformersProcessor) -> None:
    budgets = [ImageBudget(max_pixels=20 * 784), ImageBudget(max_pixels=30 * 784), ImageBudget(max_tokens=20)]
    prints = {paddleocr.within(budget).fingerprint for budget in budgets}
    assert len(prints | {paddleocr.fingerprint}) == 4
    assert paddleocr.within(ImageBudget()) is paddleocr
