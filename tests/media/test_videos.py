"""Videos as lists of frames and as files: which frames are taken, what they become, what is refused."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize
from transformers.video_utils import VideoMetadata

from tests.media import glm_videos
from tests.media.images_for_tests import encoded, noise
from tests.normalized import normalized
from tests.rendering import without_module
from vlmserve.errors import (
    ImageFetchError,
    ImageTooLargeError,
    InvalidImageError,
    InvalidRequestError,
    InvalidVideoError,
    VideoTooLargeError,
)
from vlmserve.media.budget import ImageBudget
from vlmserve.media.cache import ImageCache
from vlmserve.media.dynamic_resolution import DynamicResolutionProcessor
from vlmserve.media.frame_times import FrameTimes
from vlmserve.media.images import DecodedImage
from vlmserve.media.videos import Timing, VideoProcessor, VideoSource, prepare_video
from vlmserve.settings.config import MediaConfig, ProcessorOverrides
from vlmserve.types import ImageInput

SETTINGS: dict[str, Any] = {
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 256, "longest_edge": 2048},
}
QWEN25 = {"model_type": "qwen2_5_vl", "tokens_per_second": 2}
PROCESSOR = VideoProcessor.from_settings(SETTINGS, QWEN25)
LIMITS = MediaConfig()
FRAMES = [noise(40, 24, seed=seed) for seed in range(6)]


def prepare(source: VideoSource, processor: VideoProcessor = PROCESSOR, salt: str = "", **limits: Any) -> ImageInput:
    return prepare_video(source, processor, MediaConfig(**limits), ImageCache(0), salt=salt)


def timing(**fields: Any) -> Timing:
    return Timing(**{"fps": 2.0, "min_frames": 4, "max_frames": 768, "depth": 2, "positions_per_second": 2, **fields})


@pytest.mark.parametrize(
    ("num_frames", "rate", "fields", "expected"),
    [
        (100, 25.0, {}, [0, 12, 25, 37, 50, 62, 75, 87]),
        (100, 25.0, {"fps": 0.5}, [0, 25, 50, 75]),
        (100, 25.0, {"fps": 1.3}, [0, 25, 50, 75]),
        (100, 25.0, {"max_frames": 3}, [0, 50]),
        (9, 3.0, {"fps": 100.0}, [0, 1, 2, 3, 4, 5, 6, 7]),
        (3, 30.0, {}, [0, 1]),
        (1, 30.0, {}, [0]),
    ],
)
def test_frames_are_taken_evenly_and_in_whole_pairs(
    num_frames: int, rate: float, fields: dict[str, Any], expected: list[int]
) -> None:
    assert timing(**fields).sample(num_frames, rate) == expected


TIMES = FrameTimes(lambda text: list(text.encode()), "(", ")")
QWEN3 = {"model_type": "qwen3_vl"}


@pytest.mark.parametrize("num_frames", [1, 2, 3, 7, 25, 99, 100, 2000])
@pytest.mark.parametrize("rate", [1.0, 23.976, 30.0])
@pytest.mark.parametrize("fps", [0.5, 2.0])
def test_frames_to_the_end_equal_transformers(num_frames: int, rate: float, fps: float) -> None:
    own: Any = SimpleNamespace(fps=2, min_frames=4, max_frames=768)
    metadata = VideoMetadata(total_num_frames=num_frames, fps=rate)
    expected = Qwen3VLVideoProcessor.sample_frames(own, metadata, fps=fps).tolist()
    assert timing(to_the_end=True, fps=fps).sample(num_frames, rate) == expected


@pytest.mark.parametrize("num_frames", [2, 3, 4, 5, 6, 7, 30, 61])
def test_frames_share_video_pixels_as_in_transformers(num_frames: int) -> None:
    settings = {**SETTINGS, "size": {"shortest_edge": 4000, "longest_edge": 40_000}}
    videos = VideoProcessor.from_settings(settings, QWEN3, times=TIMES)
    for width, height in ((40, 24), (100, 30), (7, 50), (300, 2), (640, 480), (12, 12)):
        pixels, _ = videos.process(iter([DecodedImage.whole(noise(width, height))] * num_frames), num_frames, LIMITS)
        assert pixels.shape[2:] == smart_resize(num_frames, height, width, 2, 8, 4000, 40_000)


GLM_TIMES = FrameTimes(TIMES.encode, "(", ")", time_follows=True)
GLM = VideoProcessor.from_settings(SETTINGS, {}, times=GLM_TIMES)


@pytest.mark.parametrize("num_frames", [1, 2, 7, 25, 26, 99, 100, 250, 2000, 80_000])
@pytest.mark.parametrize("rate", [0.4, 1.0, 6.0, 23.976, 30.0])
def test_frames_of_glm_are_those_that_transformers_takes(num_frames: int, rate: float) -> None:
    own: Any = SimpleNamespace(temporal_patch_size=2)
    metadata = VideoMetadata(total_num_frames=num_frames, fps=rate, duration=num_frames / rate)
    taken = GLM.timing.sample(num_frames, rate)
    if int(num_frames / rate * 6) == 0:
        assert taken == [0, 0], "for which transformers takes none"
    else:
        assert taken == glm_videos.module().Glm46VVideoProcessor.sample_frames(own, metadata).tolist()


def test_glm_frames_keep_requested_limits_and_rates() -> None:
    assert len(GLM.timing.sample(100_000, 30.0)) == 640
    few = VideoProcessor.from_settings(SETTINGS, {}, times=GLM_TIMES, max_frames=9)
    assert few.timing.sample(900, 30.0) == [0, 128, 256, 385, 513, 642, 770, 899]
    assert GLM.within(ImageBudget(), 0.2).timing.sample(900, 30.0) == [0, 180, 360, 539, 719, 899]
    fixed = VideoProcessor.from_settings(SETTINGS, {}, times=GLM_TIMES, overrides=ProcessorOverrides(fps=0.2))
    assert fixed.timing.sample(900, 30.0) == [0, 180, 360, 539, 719, 899]


@pytest.mark.parametrize("num_frames", [2, 3, 6, 61])
def test_frames_of_glm_have_the_sizes_of_transformers(num_frames: int) -> None:
    size = {"size": {"shortest_edge": 4000, "longest_edge": 40_000}}
    # What an image processor counts twice is counted once, as the settings are those of a video processor, too.
    for named in ({}, {"image_processor_type": "Glm46VImageProcessor"}):
        videos = VideoProcessor.from_settings({**SETTINGS, **named, **size}, {}, times=GLM_TIMES)
        for width, height in ((40, 24), (100, 30), (7, 50), (300, 2), (12, 12)):
            frames = iter([DecodedImage.whole(noise(width, height))] * num_frames)
            pixels, _ = videos.process(frames, num_frames, LIMITS)
            assert pixels.shape[2:] == glm_videos.smart_resize()(num_frames, height, width, 2, 8, 4000, 40_000)


def test_times_are_those_that_transformers_writes() -> None:
    theirs: Any = Qwen3VLProcessor.__new__(Qwen3VLProcessor)
    theirs.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    theirs.vision_start_token, theirs.video_token, theirs.vision_end_token = "(*)"
    for num_frames, rate in ((1, 2.0), (2, 2.0), (5, 0.7), (6, 23.976)):
        seconds = [index / rate for index in range(num_frames)]
        text = dict(TIMES.text(seconds, 2, 3))
        metadata = SimpleNamespace(fps=rate, frames_indices=list(range(num_frames)))
        grid = torch.tensor([[-(-num_frames // 2), 2, 6]])
        expected = theirs.replace_video_token({"video_grid_thw": grid, "video_metadata": [metadata]}, 0)
        assert "".join(chr(text.get(place, ord("*"))) for place in range(len(expected))) == expected
        assert max(text) == len(expected) - 1


def test_model_reading_times_gets_them_from_all_inputs() -> None:
    videos = VideoProcessor.from_settings(SETTINGS, QWEN3, times=TIMES)

    def times(video: ImageInput) -> list[str]:
        return "".join(chr(id_) for _, id_ in video.text).replace("()", "").split(">")[:-1]

    listed = prepare(FRAMES[:3], videos)
    assert times(listed) == ["<0.2 seconds", "<1.0 seconds"]
    assert listed.grid is not None
    assert listed.num_embeddings == listed.grid[0] * listed.grid[1] * listed.grid[2]
    assert listed.frame_step == 1.0
    assert times(prepare(FRAMES[:3], videos.within(ImageBudget(), 0.5))) == ["<1.0 seconds", "<4.0 seconds"]
    filmed = prepare(video_file([colour for colour in COLOURS for _ in range(4)]), videos.within(ImageBudget(), 1.0))
    assert times(filmed) == ["<0.6 seconds", "<2.9 seconds", "<5.1 seconds"]
    assert len({listed.key, prepare(FRAMES[:3]).key}) == 2


def test_every_frame_of_a_video_keeps_a_budget() -> None:
    """Even where a model bounds all frames together, and counts an odd one less or more."""
    for videos in (PROCESSOR, VideoProcessor.from_settings(SETTINGS, QWEN3, times=TIMES)):
        for count in (1, 2, 3, 5, 6):
            for budget in (ImageBudget(max_tokens=3), ImageBudget(max_tokens=6), ImageBudget(max_pixels=300)):
                video = prepare(FRAMES[:count], videos.within(budget, None))
                budget.check_kept(video)
                assert video.size is not None
                assert (video.size.frames, video.size.tokens) == (count, video.num_tokens)
                rows, columns = video.pixels.shape[2] // 8, video.pixels.shape[3] // 8
                assert rows * columns <= (budget.max_tokens or 300 // 64)


def test_time_becomes_positions_where_the_model_counts_seconds() -> None:
    assert timing().frame_step(2.0) == 2.0
    assert timing().frame_step(0.5) == 8.0
    assert timing(positions_per_second=None).frame_step(0.5) == 1.0
    assert VideoProcessor.from_settings(SETTINGS, {"model_type": "qwen2_vl"}).timing.positions_per_second is None
    assert VideoProcessor.from_settings(SETTINGS, {"model_type": "qwen2_5_vl"}).timing.positions_per_second == 4
    assert prepare(FRAMES[:4]).frame_step == 2.0
    assert prepare(FRAMES[:4], PROCESSOR.within(ImageBudget(), 0.5)).frame_step == 8.0


def test_frames_equal_images_of_the_same_bounds(tmp_path: Path) -> None:
    video = prepare(FRAMES[:5])
    images = DynamicResolutionProcessor.from_settings(SETTINGS)
    expected = np.concatenate([images.process(DecodedImage.whole(frame)) for frame in FRAMES[:5]])
    np.testing.assert_array_equal(video.pixels, expected)
    assert video.grid == (3, 3, 5)
    assert video.num_tokens == 45
    assert not video.pixels.flags.writeable
    paths = [tmp_path / f"{index}.png" for index in range(5)]
    for path, frame in zip(paths, FRAMES, strict=False):
        path.write_bytes(encoded(frame))
    urls = ["data:image/png;base64," + base64.b64encode(path.read_bytes()).decode() for path in paths]
    for sources in (paths, urls, [path.read_bytes() for path in paths]):
        np.testing.assert_array_equal(prepare(sources).pixels, expected)


def test_whatever_changes_pixels_or_positions_changes_the_key() -> None:
    slow, small = PROCESSOR.within(ImageBudget(), 1.0), PROCESSOR.within(ImageBudget(max_pixels=600), None)
    other = VideoProcessor.from_settings(SETTINGS, {"model_type": "qwen2_vl"})
    keys = {
        prepare(FRAMES[:4]).key,
        prepare(FRAMES[:4][::-1]).key,
        prepare(FRAMES[:3]).key,
        prepare(FRAMES[:4], salt="tenant").key,
        *(prepare(FRAMES[:4], processor).key for processor in (slow, small, other)),
    }
    assert len(keys) == 7
    assert prepare(FRAMES[:4]).key in keys


def test_repeated_video_is_not_prepared_again() -> None:
    cache = ImageCache(10**6)
    first = prepare_video(FRAMES, PROCESSOR, LIMITS, cache)
    assert prepare_video(list(FRAMES), PROCESSOR, LIMITS, cache) is first
    assert prepare_video(FRAMES[1:], PROCESSOR, LIMITS, cache) is not first


@pytest.mark.parametrize(
    ("source", "limits", "error", "message"),
    [
        ([], {}, InvalidVideoError, "no frames"),
        ([*FRAMES[:2], noise(40, 30)], {}, InvalidVideoError, "frame 2 of the video has 40 x 30 pixels.*40 x 24"),
        (FRAMES, {"max_video_frames": 5}, VideoTooLargeError, "6 frames; at most 5"),
        (FRAMES, {"max_video_pixels": 5000}, VideoTooLargeError, "6 frames of 40 x 24 pixels, more than 5,000"),
        (FRAMES, {"max_video_bytes": 5 * 40 * 24 * 3}, VideoTooLargeError, "more than 14,400 bytes"),
        (FRAMES, {"max_image_pixels": 900}, ImageTooLargeError, "40 x 24"),
        ([FRAMES[0], b"no image"], {}, InvalidImageError, "not an image"),
        (noise(9, 9), {}, InvalidVideoError, "cannot be made from a Image"),
        (b"", {}, InvalidVideoError, "not a video in a supported format"),
        ("/nowhere.mp4", {}, InvalidVideoError, "no file /nowhere.mp4"),
        ("data:image/png;base64,AAAA", {}, InvalidVideoError, "not a video in a supported format"),
        (b"\0" * 100, {"max_video_bytes": 99}, VideoTooLargeError, "the video's file has 100 bytes; at most 99"),
    ],
)
def test_non_video_or_oversized_video_is_rejected(
    source: VideoSource, limits: dict[str, Any], error: type[InvalidRequestError], message: str
) -> None:
    if isinstance(source, bytes | str) and "format" in message:
        pytest.importorskip("av")
    with pytest.raises(error, match=message):
        prepare(source, **limits)


def test_requests_may_ask_for_less_but_not_more() -> None:
    assert prepare(FRAMES, PROCESSOR.within(ImageBudget(max_pixels=400), None)).grid == (3, 1, 3)
    with pytest.raises(InvalidRequestError, match="max_pixels"):
        PROCESSOR.within(ImageBudget(max_pixels=2049), None)
    bounded = VideoProcessor.from_settings(SETTINGS, QWEN25, overrides=ProcessorOverrides(max_pixels=400, fps=1.0))
    assert prepare(FRAMES, bounded).grid == (3, 1, 3)
    assert prepare(FRAMES, bounded).frame_step == 4.0


def test_network_frames_share_one_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 3))
    # A clock of its own: other threads look at the real one.
    monkeypatch.setattr("vlmserve.media.videos.time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    left = []

    def fetch(url: str, limits: MediaConfig, kind: str) -> bytes:
        left.append(limits.fetch_timeout)
        if limits.fetch_timeout < 1:
            raise ImageFetchError("it took too long")
        return encoded(FRAMES[len(left)])

    monkeypatch.setattr("vlmserve.media.sources.fetch_file", fetch)
    with pytest.raises(ImageFetchError, match="together they took longer than 10 s"):
        prepare([f"http://example.com/{index}.png" for index in range(5)])
    assert left == [7.0, 4.0, 1.0, 0.001]


COLOURS = [(250, 20, 20), (20, 250, 20), (20, 20, 250), (240, 240, 20), (20, 240, 240), (240, 20, 240)]


def video_file(colours: Sequence[tuple[int, int, int]], *, rate: int = 4, size: tuple[int, int] = (64, 48)) -> bytes:
    """An MP4 file with a frame of each colour, whose left half is darker."""
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=Fraction(rate))
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.bit_rate = 4_000_000
        for colour in colours:
            image = Image.new("RGB", size, colour)
            image.paste(tuple(level // 4 for level in colour), (0, 0, size[0] // 2, size[1]))
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode())
    return file.getvalue()


def brightness(pixels: np.ndarray) -> np.ndarray:
    """Of each channel of each frame's right half, from 0 to 255, roughly."""
    mean, std = np.array([0.4815, 0.4578, 0.4082]), np.array([0.2686, 0.2613, 0.2758])
    return (pixels[..., pixels.shape[3] // 2 + 2 :].mean((2, 3)) * std + mean) * 255


def test_frames_of_a_file_are_as_requested(tmp_path: Path) -> None:
    data = video_file([colour for colour in COLOURS for _ in range(4)])
    path = tmp_path / "film.mp4"
    path.write_bytes(data)
    url = "data:video/mp4;base64," + base64.b64encode(data).decode()
    for source in (data, path, str(path), url):
        video = prepare(source, PROCESSOR.within(ImageBudget(), 1.0))
        assert video.pixels.shape[0] == 6
        np.testing.assert_allclose(brightness(normalized(video)), COLOURS, atol=25)
        assert video.frame_step == 4.0, "2 frames a second apart, 2 positions a second"
    few = prepare(data, PROCESSOR.within(ImageBudget(), 0.1))
    np.testing.assert_allclose(brightness(normalized(few)), [COLOURS[index] for index in (0, 1, 3, 4)], atol=25)
    assert few.frame_step == 6.0, "4 of 6 seconds"
    capped = prepare(data, VideoProcessor.from_settings(SETTINGS, QWEN25, max_frames=2))
    assert capped.pixels.shape[0] == 2
    assert len({few.key, capped.key, video.key}) == 3


def test_a_file_that_was_filmed_sideways_stands_upright() -> None:
    data = bytearray(video_file(COLOURS[:4]))
    header = data.index(b"tkhd")
    matrix = header + 4 + 40
    quarter = np.array([0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30], ">i4").tobytes()
    assert data[matrix : matrix + 4] == (1 << 16).to_bytes(4, "big")
    data[matrix : matrix + 36] = quarter
    video = prepare(bytes(data))
    assert video.pixels.shape[2] > video.pixels.shape[3]
    upper, lower = np.split(video.pixels[..., : video.pixels.shape[2] // 2 * 2, :], 2, 2)
    # The matrix turns clockwise, so the dark left half comes to lie above.
    assert upper.mean() < lower.mean() - 0.5


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_decoded_frames": 5}, "more than 5 frames"),
        ({"max_frame_pixels": 3000}, "frames have 64 x 48 pixels; at most 3,000"),
        ({"max_video_pixels": 5000}, "more than 5,000 in all"),
    ],
)
def test_a_file_that_is_too_large_is_refused(limits: dict[str, int], message: str) -> None:
    with pytest.raises(VideoTooLargeError, match=message):
        prepare(video_file(COLOURS), **limits)


def test_broken_files_are_refused() -> None:
    data = video_file(COLOURS)
    for broken in (data[: len(data) // 3], data[:40], data[:8] + bytes(200)):
        with pytest.raises(InvalidVideoError, match=r"broken|frames"):
            prepare(broken)
    damaged = bytearray(data)
    start = damaged.index(b"mdat") + 4
    damaged[start : start + len(damaged) // 2] = bytes(len(damaged) // 2)
    with pytest.raises(InvalidVideoError, match="broken"):
        prepare(bytes(damaged))


@pytest.mark.parametrize(
    "data",
    [
        b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
        b"ffconcat version 1.0\nfile '/etc/passwd'\n",
        b"<?xml version='1.0'?><MPD></MPD>",
        b"RIFF\x24\0\0\0WAVEfmt " + bytes(40),
        encoded(noise(9, 9)),
    ],
    ids=["hls", "concat", "dash", "sound", "an image"],
)
def test_lists_of_other_files_are_not_opened(data: bytes) -> None:
    pytest.importorskip("av")
    with pytest.raises(InvalidVideoError, match="supported format"):
        prepare(data)


def test_without_the_library_only_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with without_module(monkeypatch, "av"), pytest.raises(InvalidVideoError, match=r"pip install 'vlmserve\[video\]'"):
        prepare(b"\0\0\0\x20ftypisom")
    assert prepare(FRAMES).num_tokens
