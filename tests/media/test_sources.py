from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.media.images_for_tests import encoded, exif_rotated, noise
from vlmserve.errors import ImageFetchError, ImageTooLargeError, InvalidImageError
from vlmserve.media.cache import ImageCache
from vlmserve.media.images import DecodedImage
from vlmserve.media.processor import FixedSizeProcessor
from vlmserve.media.sources import prepare_image, read_url
from vlmserve.settings.config import MediaConfig

LIMITS = MediaConfig()
OFF = ImageCache(0)
PROCESSOR = FixedSizeProcessor(
    {"model_type": "llava", "vision_config": {"image_size": 28, "patch_size": 14}},
    {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
)
IMAGE = noise(40, 30)
DATA = encoded(IMAGE)


def test_image_is_the_same_from_every_source(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(DATA)
    url = "data:image/png;base64," + base64.b64encode(DATA).decode()
    files = [prepare_image(source, PROCESSOR, LIMITS, OFF) for source in (DATA, path, str(path), url)]
    decoded = [prepare_image(source, PROCESSOR, LIMITS, OFF) for source in (IMAGE, np.asarray(IMAGE))]
    assert len({image.key for image in files}) == 1
    assert len({image.key for image in decoded}) == 1
    for image in files + decoded:
        np.testing.assert_array_equal(image.pixels, PROCESSOR.process(DecodedImage.whole(IMAGE)))
        assert image.num_tokens == PROCESSOR.num_tokens == 4


def test_opened_photo_is_upright_like_its_file() -> None:
    data = exif_rotated(40, 20, 8)
    opened = prepare_image(Image.open(io.BytesIO(data)), PROCESSOR, LIMITS, OFF)
    np.testing.assert_array_equal(opened.pixels, prepare_image(data, PROCESSOR, LIMITS, OFF).pixels)


def test_opened_truncated_image_is_rejected() -> None:
    opened = Image.open(io.BytesIO(encoded(noise(300, 200))[:-5000]))
    with pytest.raises(InvalidImageError, match="truncated"):
        prepare_image(opened, PROCESSOR, LIMITS, OFF)


def test_missing_files_folders_and_large_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidImageError, match="there is no file"):
        prepare_image(tmp_path / "missing.png", PROCESSOR, LIMITS, OFF)
    with pytest.raises(InvalidImageError, match="not a file"):
        prepare_image(str(tmp_path), PROCESSOR, LIMITS, OFF)
    (tmp_path / "large.png").write_bytes(DATA)
    with pytest.raises(ImageTooLargeError):
        prepare_image(tmp_path / "large.png", PROCESSOR, MediaConfig(max_image_bytes=10), OFF)


def test_other_things_are_no_images() -> None:
    with pytest.raises(InvalidImageError, match="an image cannot be made from a dict"):
        prepare_image({}, PROCESSOR, LIMITS, OFF)  # type: ignore[arg-type]


def test_decoded_images_keep_the_limit_of_pixels_too() -> None:
    with pytest.raises(ImageTooLargeError, match="40 x 30"):
        prepare_image(IMAGE, PROCESSOR, MediaConfig(max_image_pixels=1000), OFF)


@pytest.mark.parametrize("url", ["/etc/passwd", "ftp://example.com/a.png", "", "image.png"])
def test_only_web_and_data_urls_are_read(url: str) -> None:
    with pytest.raises(ImageFetchError, match="must begin with"):
        read_url(url, LIMITS)
