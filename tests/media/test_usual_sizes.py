"""Sizes of images, pages and videos by what they cost, for every kind of processor."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from tests.media.images_for_tests import noise
from tests.media.test_cache import PROCESSOR as ONE_SIZE
from tests.media.test_dynamic_resolution import SETTINGS as ANY_SIZE
from tests.media.test_grids import grid_processor
from tests.media.test_rows import row_processor
from tests.media.test_tiles import NEXT, SPLIT_SETTINGS, next_processor, split_processor
from tests.media.test_videos import QWEN25, prepare
from tests.media.test_videos import SETTINGS as VIDEO
from vlmserve.image_cost import ImageCost
from vlmserve.media import usual_sizes
from vlmserve.media.budget import NO_BUDGET, ImageBudget
from vlmserve.media.dynamic_resolution import DynamicResolutionProcessor
from vlmserve.media.images import DecodedImage
from vlmserve.media.processor import ImageProcessor
from vlmserve.media.sources import process_image
from vlmserve.media.usual_sizes import UsualSizes
from vlmserve.media.videos import VideoProcessor
from vlmserve.settings.config import MediaConfig

COST = ImageCost(0.001, 0.0)
"""A second buys 1,000 pixels."""
PROCESSORS: dict[str, Callable[[], ImageProcessor]] = {
    "any size": lambda: DynamicResolutionProcessor.from_settings(ANY_SIZE),
    "layouts": lambda: next_processor(NEXT),
    "split": lambda: split_processor(next(iter(SPLIT_SETTINGS.values()))),
    "grid": grid_processor,
    "rows": row_processor,
}


@pytest.fixture(autouse=True)
def tiny_floors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usual_sizes, "LEAST_PIXELS", 1)
    monkeypatch.setattr(usual_sizes, "LEAST_FRAME_PIXELS", 1)


def usual(image_seconds: float = 5.0, video_seconds: float = 20.0) -> UsualSizes:
    return UsualSizes(COST, image_seconds, video_seconds)


def seen(processor: ImageProcessor, budget: ImageBudget) -> int:
    """Area that the model sees of a large image."""
    size = process_image(b"", DecodedImage.whole(noise(400, 300)), processor.within(budget)).size
    assert size is not None
    assert size.model_width is not None
    assert size.model_height is not None
    return size.model_width * size.model_height


@pytest.mark.parametrize("kind", PROCESSORS)
def test_usual_image_is_smaller_than_high_detail(kind: str):
    processor = PROCESSORS[kind]()
    full = seen(processor, NO_BUDGET)
    assert seen(processor, usual().for_images(ImageBudget.of({}, "high"))) == full
    assert seen(processor, usual().for_images(ImageBudget.of({}, "original"))) == full
    half = usual(image_seconds=0.6 * full * COST.per_pixel).for_images(NO_BUDGET)
    assert seen(processor, half) <= 0.6 * full
    assert processor.within(half).fingerprint != processor.fingerprint


@pytest.mark.parametrize("kind", PROCESSORS)
def test_a_fast_machine_changes_nothing(kind: str):
    processor = PROCESSORS[kind]()
    assert processor.within(usual(image_seconds=1e9).for_images(NO_BUDGET)) is processor
    assert processor.within(UsualSizes(COST, math.inf, math.inf).for_images(NO_BUDGET)) is processor


@pytest.mark.parametrize("kind", PROCESSORS)
def test_no_machine_is_too_slow_for_a_model(kind: str):
    processor = PROCESSORS[kind]()
    assert seen(processor, usual(image_seconds=1e-9).for_images(NO_BUDGET)) > 0


def test_one_size_stays_as_it_is():
    assert ONE_SIZE.within(usual(image_seconds=1e-9).for_images(NO_BUDGET)) is ONE_SIZE


def test_bounds_of_a_request_replace_the_usual_size():
    processor = PROCESSORS["any size"]()
    sizes = usual(image_seconds=1.0)
    assert seen(processor, sizes.for_images(NO_BUDGET)) <= 1000
    assert 1000 < seen(processor, sizes.for_images(ImageBudget(max_pixels=2200))) <= 2200
    assert 1000 < seen(processor, sizes.for_images(ImageBudget(max_tokens=32))) <= 32 * 64
    assert seen(processor, sizes.for_images(ImageBudget(min_pixels=2000))) >= 2000


def test_low_detail_is_never_more_than_usual():
    assert usual().for_images(ImageBudget(low_detail=True)) == ImageBudget(low_detail=True)


def test_slow_machines_still_see_low_detail(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    budget = UsualSizes(ImageCost(1.0, 0.0), 5.0, 20.0).for_images(NO_BUDGET, 30)
    assert budget.usual_pixels == 512 * 512


def test_pages_share_the_time_of_their_document():
    assert usual().for_images(NO_BUDGET).usual_pixels == 5000
    assert usual().for_images(NO_BUDGET, 2).usual_pixels == 5000
    pages = usual().for_images(NO_BUDGET, 10)
    assert pages.usual_pixels == 2000
    assert usual().for_images(pages) == pages, "a page is not an image of its own"


def test_settings_of_the_server_replace_the_usual_size():
    assert UsualSizes.of(MediaConfig(), None) is None
    for own in ({"max_pixels": 900}, {"max_tokens": 9}):
        assert UsualSizes.of(MediaConfig(mm_processor_kwargs=own), COST) is None
    unlimited = UsualSizes.of(MediaConfig(image_seconds=0, video_seconds=0), COST)
    assert unlimited is not None
    assert unlimited.for_images(NO_BUDGET, 30) == NO_BUDGET
    assert unlimited.frame_budget(3) == NO_BUDGET
    assert unlimited.max_groups() == math.inf


def test_frames_of_a_video_share_its_time():
    video = VideoProcessor.from_settings(VIDEO, QWEN25)
    frames = [noise(400, 300, seed=seed) for seed in range(6)]
    full = prepare(frames, video)
    # Two frames share embeddings: three groups in 1.5 s get 500 pixels each.
    sizes = usual(video_seconds=1.5)
    less = prepare(frames, video.within(NO_BUDGET, None, sizes))
    assert less.pixels.shape[0] == full.pixels.shape[0] == 6
    assert less.pixels[0, 0].size <= 500 < full.pixels[0, 0].size
    assert less.key != full.key
    own = prepare(frames, video.within(ImageBudget(max_pixels=1000), None, sizes))
    assert 500 < own.pixels[0, 0].size <= 1000


def test_long_video_gets_fewer_frames_by_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(usual_sizes, "LEAST_FRAME_PIXELS", 1000)
    video = VideoProcessor.from_settings(VIDEO, QWEN25)
    assert len(video.timing.sample(600, 10.0)) == 120
    assert len(video.within(NO_BUDGET, None, usual()).timing.sample(600, 10.0)) == 40
    assert len(video.within(NO_BUDGET, None, usual(video_seconds=1e-9)).timing.sample(600, 10.0)) == 16
    assert len(video.within(NO_BUDGET, 2.0, usual()).timing.sample(600, 10.0)) == 120
