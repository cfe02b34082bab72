"""file:// URLs lead into one folder and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.media.images_for_tests import encoded, noise
from vlmserve.errors import ImageFetchError, ImageTooLargeError, VideoTooLargeError
from vlmserve.media.sources import read_url
from vlmserve.settings.config import MediaConfig

IMAGE = encoded(noise(12, 9))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "allowed"
    (folder / "deeper").mkdir(parents=True)
    (folder / "an image.png").write_bytes(IMAGE)
    (folder / "deeper" / "100%.png").write_bytes(IMAGE)
    (folder / "inside.png").symlink_to("deeper/100%.png")
    (tmp_path / "secret").write_bytes(IMAGE)
    (tmp_path / "allowed-too").mkdir()
    (tmp_path / "allowed-too" / "secret").write_bytes(IMAGE)
    (folder / "out").symlink_to("../secret")
    (folder / "away").symlink_to("..")
    (folder / "round").symlink_to("round")
    os.mkfifo(folder / "pipe")
    return folder


def limits(root: Path, **changes: int) -> MediaConfig:
    return MediaConfig(allowed_media_path=str(root), **changes)


@pytest.mark.parametrize(
    "path", ["an%20image.png", "deeper/100%25.png", "inside.png", "deeper/../an%20image.png", "./an image.png"]
)
@pytest.mark.parametrize("scheme", ["file://", "FILE://", "file://localhost"])
def test_files_in_the_folder_are_read(root: Path, scheme: str, path: str) -> None:
    assert read_url(f"{scheme}{root}/{path}", limits(root)) == IMAGE


@pytest.mark.parametrize(
    "path",
    ["../secret", "%2e%2e/secret", "deeper/../../secret", "../allowed-too/secret", "out", "away/secret", "..%2fsecret",
     "../nothing", "../../../../etc/passwd", "away/away/etc/passwd"],
)  # fmt: skip
def test_outside_files_are_rejected_whether_they_exist(root: Path, path: str) -> None:
    with pytest.raises(ImageFetchError, match="not in the folder that --allowed-media-path allows"):
        read_url(f"file://{root}/{path}", limits(root))


@pytest.mark.parametrize("path", ["nothing.png", "deeper", "", "pipe", "round", "a%00b", "an%20image.png/x"])
def test_special_file_is_rejected_without_waiting(root: Path, path: str) -> None:
    with pytest.raises(ImageFetchError):
        read_url(f"file://{root}/{path}", limits(root))


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/"])
def test_devices_are_refused_even_where_everything_is_allowed(path: str) -> None:
    with pytest.raises(ImageFetchError, match="does not name a file"):
        read_url(f"file://{path}", MediaConfig(allowed_media_path="/"))


@pytest.mark.parametrize(
    "url",
    ["file://host/a.png", "file://relative.png", "file://", "file:///a.png?x=1", "file:///a.png#x", "file://[::1/a"],
)
def test_malformed_urls_are_refused(root: Path, url: str) -> None:
    with pytest.raises(ImageFetchError, match="malformed"):
        read_url(url, limits(root))


@pytest.mark.parametrize("url", ["file:///etc/passwd", "file:///nothing", "file://host/x"])
def test_default_reads_no_file_and_explains(url: str) -> None:
    with pytest.raises(ImageFetchError, match="--allowed-media-path"):
        read_url(url, MediaConfig())


def test_a_file_over_the_limit_is_refused(root: Path) -> None:
    url = f"file://{root}/inside.png"
    assert read_url(url, limits(root, max_image_bytes=len(IMAGE))) == IMAGE
    with pytest.raises(ImageTooLargeError):
        read_url(url, limits(root, max_image_bytes=len(IMAGE) - 1))
    with pytest.raises(VideoTooLargeError):
        read_url(url, limits(root, max_video_bytes=len(IMAGE) - 1), "video")


def test_the_folder_itself_may_be_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    assert read_url(f"file://{tmp_path}/link/inside.png", limits(tmp_path / "link")) == IMAGE
    assert read_url(f"file://{root}/inside.png", limits(tmp_path / "link")) == IMAGE
