"""Images, documents and videos of requests on a machine that encodes slowly."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_qwen_vl
from tests.frontend.test_document_parts import file_part
from tests.frontend.test_frames import video_url
from tests.frontend.test_requests import data_url, user
from tests.media.documents_for_tests import page, pdf_file, square
from tests.media.images_for_tests import encoded, noise
from tests.media.test_videos import COLOURS, video_file
from tests.prompt.tokenizers_for_tests import byte_level, write_checkpoint
from vlmserve.frontend.requests import RequestPreparer
from vlmserve.image_cost import ImageCost
from vlmserve.media import usual_sizes
from vlmserve.settings.config import MediaConfig
from vlmserve.types import ImageInput, ModelInfo

PHOTO = data_url(encoded(noise(120, 90)))


@pytest.fixture(autouse=True)
def tiny_floors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usual_sizes, "LEAST_PIXELS", 800)
    monkeypatch.setattr(usual_sizes, "LEAST_FRAME_PIXELS", 800)
    monkeypatch.setattr(usual_sizes, "LEAST_GROUPS", 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen_vl(tmp_path_factory.mktemp("qwen"), "qwen2_5_vl")


def fitted(folder: Path, cost: ImageCost | None, **media: Any) -> RequestPreparer:
    preparer = RequestPreparer(folder, MediaConfig(page_dpi=72, **media))
    preparer.fit(ModelInfo("tiny", "qwen", 9000, 100, "float32", "cpu", 10, 8999, 1000, True, image_cost=cost))
    return preparer


def images(preparer: RequestPreparer, *parts: Any, **request: Any) -> list[ImageInput]:
    return [span.image for span in preparer.chat([user(*parts)], **request).images]


def areas(preparer: RequestPreparer, *parts: Any, **request: Any) -> list[int]:
    """Pixels of each image, or of each frame of a video."""
    return [image.pixels[0, 0].size for image in images(preparer, *parts, **request)]


def detailed(detail: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": PHOTO["image_url"]["url"], "detail": detail}}


def film() -> dict[str, Any]:
    """Six seconds."""
    return video_url(video_file([colour for colour in COLOURS for _ in range(4)]))


def test_photo_size_fits_its_time(folder: Path):
    slow = fitted(folder, ImageCost(0.001, 0.0), image_seconds=1.0)
    [whole] = areas(fitted(folder, None), PHOTO)
    [usual] = areas(slow, PHOTO)
    assert 700 <= usual <= 1000 < whole
    assert areas(slow, detailed("auto")) == [usual]
    assert areas(slow, detailed("high")) == areas(slow, detailed("original")) == [whole]
    assert [usual] < areas(slow, PHOTO, mm_processor_kwargs={"max_pixels": 1700}) < [1701]
    assert areas(slow, {**PHOTO, "max_tokens": 10**6}) == [whole]
    assert areas(fitted(folder, ImageCost(0.001, 0.0), image_seconds=0), PHOTO) == [whole]
    assert areas(fitted(folder, ImageCost(1.0, 0.0)), PHOTO) <= [800]


def test_images_of_other_sizes_share_no_cache_entry(folder: Path):
    slow = fitted(folder, ImageCost(0.001, 0.0), image_seconds=1.0)
    slower = fitted(folder, ImageCost(0.001, 0.0), image_seconds=0.9)
    keys = [image.key for image in [*images(slow, PHOTO, detailed("high")), *images(slower, PHOTO)]]
    assert len({*keys}) == 3
    again = fitted(folder, ImageCost(0.001, 0.0), image_seconds=1.0)
    assert [image.key for image in images(again, PHOTO)] == keys[:1]


def test_pages_of_a_long_document_share_its_time(folder: Path):
    slow = fitted(folder, ImageCost(0.001, 0.0), image_seconds=2.0, video_seconds=3.0)
    pdf = pdf_file([page(square("1 0 0")), page(square("0 0 1")), page(square("0 1 0"))])
    [one] = areas(slow, file_part(pdf, pages="1"))
    assert 1000 < one <= 2000
    for area in areas(slow, file_part(pdf)):
        assert 700 <= area <= 1000
    assert areas(slow, file_part(pdf, max_pixels=2000)) == [one] * 3


def test_video_frame_count_fits_its_time(folder: Path):
    pytest.importorskip("av")
    part = film()
    [full] = images(fitted(folder, None), part)
    [less] = images(fitted(folder, ImageCost(0.001, 0.0), video_seconds=2.5), part)
    assert (len(full.pixels), len(less.pixels)) == (12, 6)
    assert less.pixels[0, 0].size <= 834
    [asked] = images(fitted(folder, ImageCost(0.001, 0.0), video_seconds=2.5), {**part, "fps": 2})
    assert len(asked.pixels) == 12


def test_frames_as_images_share_the_video_time(tmp_path: Path):
    pytest.importorskip("av")
    folder = write_checkpoint(tmp_path, byte_level())
    part = film()
    full = images(fitted(folder, None), part)
    area = full[0].pixels[0, 0].size
    slow = fitted(folder, ImageCost(1.0 / area, 0.0), video_seconds=3.0)
    assert (len(full), len(images(slow, part))) == (6, 3)
    assert len(images(slow, {**part, "fps": 1})) == 6


@pytest.mark.parametrize(
    ("cost", "text"),
    [
        (
            0.001,
            'at most 0.001 megapixels, about 1 s each here; more: detail "high" in a request, or --image-seconds 4',
        ),
        (1e-9, "up to the checkpoint's own size"),
    ],
)
def test_the_log_says_how_large_images_are(folder: Path, cost: float, text: str, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        fitted(folder, ImageCost(cost, 0.0), image_seconds=1.0)
    assert f"Images: {text}" in caplog.messages


def test_useful_pixels_are_what_a_square_shows(folder: Path):
    slow, whole = fitted(folder, ImageCost(0.001, 0.0), image_seconds=1.0), fitted(folder, None)
    large = data_url(encoded(noise(300, 300)))
    for preparer in (slow, whole):
        assert areas(preparer, large) == [preparer.media.useful_pixels()]
    assert slow.media.useful_pixels() < whole.media.useful_pixels()
    assert fitted(folder, None, exact_pixels=True).media.useful_pixels() is None
