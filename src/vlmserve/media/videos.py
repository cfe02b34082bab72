"""Preprocesses videos frame by frame, with timestamps or time-based positions."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Any, Self, TypeAlias

import msgspec
import numpy as np
from blake3 import blake3

from vlmserve.errors import ImageFetchError, InvalidVideoError, VideoTooLargeError
from vlmserve.media.budget import ImageBudget
from vlmserve.media.cache import ImageCache
from vlmserve.media.decoding import DecodingMemory
from vlmserve.media.dynamic_resolution import DynamicResolutionProcessor, pixel_bounds
from vlmserve.media.frame_times import FrameTimes
from vlmserve.media.images import DecodedImage
from vlmserve.media.keys import video_key
from vlmserve.media.processor import whole_view
from vlmserve.media.sources import ImageSource, Opened, Preprocessing, open_image, read_source
from vlmserve.media.usual_sizes import UsualSizes
from vlmserve.media.video_files import VideoFile
from vlmserve.settings.config import MediaConfig, ProcessorOverrides
from vlmserve.types import ImageInput, ImageSize, Pixels

VideoSource: TypeAlias = ImageSource | Sequence[ImageSource]
"""A video file as path, URL or bytes, or a list of frames."""

FRAME_BOUNDS = (128 * 28 * 28, 768 * 28 * 28)
"""Default minimum and maximum pixels of a frame."""
VIDEO_BOUNDS = (128 * 32 * 32, 768 * 32 * 32)
"""Default minimum and maximum pixels of all frames of a video, for models that bound their sum."""
FPS, MIN_FRAMES, MAX_FRAMES = 2.0, 4, 768
GLM_BOUNDS = (112 * 112, 28 * 28 * 60000)
"""`VIDEO_BOUNDS` of GLM-V."""
GLM_RATES = ((30, 3.0), (300, 1.0), (2400, 0.5))
"""GLM-V's embeddings per second, by maximum seconds of a file. Longer files count as the longest entry."""
GLM_MAX_FRAMES = 640


@dataclass(frozen=True)
class Timing:
    fps: float
    """Sampled frames per second of a file; for a list of frames, their rate."""
    min_frames: int
    """Minimum frames of a file, if it has them."""
    max_frames: int
    depth: int
    """Frames that share an embedding."""
    positions_per_second: float | None
    """None: one position for each group of `depth` frames."""
    to_the_end: bool = False
    """The sample includes the first and the last frame."""
    by_length: bool = False
    """`fps` depends on the length, as for GLM-V."""

    def sample(self, num_frames: int, rate: float) -> list[int]:
        """Sample evenly, in multiples of `depth` if possible. rate: frames per second of the file."""
        if self.by_length:
            return self._sample_by_length(num_frames, rate)
        if self.to_the_end:
            count = min(max(int(num_frames / rate * self.fps), self.min_frames), self.max_frames, num_frames)
            return [int(index) for index in np.linspace(0, num_frames - 1, count).round()]
        depth = self.depth
        most = min(self.max_frames, num_frames) // depth * depth
        wanted = min(max(num_frames / rate * self.fps, self.min_frames), most)
        count = max(1, int(wanted) // depth * depth)
        return [int(index * (num_frames / count)) for index in range(count)]

    def _sample_by_length(self, num_frames: int, rate: float) -> list[int]:
        """Sample as GLM-4.6V's video processor in transformers. The last frame may come twice."""
        length = min(num_frames / rate, GLM_RATES[-1][0])
        per_second = next(own for longest, own in GLM_RATES if length <= longest)
        most = min(self.max_frames // self.depth * self.depth, GLM_MAX_FRAMES)
        count = max(1, min(int(length * per_second * self.depth), most))
        indices: list[int] = []
        if num_frames >= count:
            # The first frame at or after each due time.
            due, step = 0.0, 1 / (self.depth * per_second)
            for index in range(num_frames):
                if index * (1 / rate) >= due:
                    due += step
                    indices.append(index)
                    if due >= int(num_frames / rate):
                        break
        if len(indices) != count:
            last = indices[-1] if indices and len(indices) < count else num_frames - 1
            indices = [int(index) for index in np.linspace(0, last, count, dtype=int)]
        indices = sorted(set(indices))
        return [*indices, *indices[-1:] * (-len(indices) % self.depth)]

    def frame_step(self, rate: float) -> float:
        if self.positions_per_second is None:
            return 1.0
        return float(np.float32(self.positions_per_second) * np.float32(self.depth / rate))


class VideoProcessor:
    """Preprocesses a checkpoint's videos. fingerprint: 32-byte digest of everything that affects pixels and positions.

    bounds: minimum and maximum pixels of all frames together. times: writes timestamps; None: positions encode time.
    usual: limits sizes by the cost of frames.
    """

    def __init__(
        self,
        frames: DynamicResolutionProcessor,
        timing: Timing,
        bounds: tuple[int, int] | None = None,
        times: FrameTimes | None = None,
        usual: UsualSizes | None = None,
    ) -> None:
        self._frames = frames
        self.timing = timing
        self._bounds = bounds
        self._times = times
        self._usual = usual
        written = None if times is None else (times.begin, times.end, times.time_follows)
        facts: list[Any] = ["videos v3", asdict(timing), bounds, written]
        if usual is not None:
            facts.append([*msgspec.structs.astuple(usual.cost), usual.video_seconds])
        described = json.dumps(facts, sort_keys=True).encode()
        self.fingerprint = blake3(frames.fingerprint + described).digest()

    @classmethod
    def from_settings(
        cls,
        settings: dict[str, Any],
        vision_config: Mapping[str, Any],
        *,
        exact_pixels: bool = False,
        overrides: ProcessorOverrides | None = None,
        max_frames: int = MAX_FRAMES,
        times: FrameTimes | None = None,
    ) -> Self:
        """settings: of the checkpoint's video processor. vision_config: of its config.json. max_frames: the server's
        limit. times: writes timestamps; such models also bound the pixels of all frames together."""
        overrides = overrides or ProcessorOverrides()
        is_glm = times is not None and times.time_follows
        bounds, own = None, settings
        if times is not None:
            bounds = pixel_bounds(settings, GLM_BOUNDS if is_glm else VIDEO_BOUNDS)
            unset = ("image_processor_type", "size", "min_pixels")
            own = {**settings, **dict.fromkeys(unset), "max_pixels": bounds[1]}
        frames = DynamicResolutionProcessor.from_settings(
            own, exact_pixels=exact_pixels, overrides=overrides, bounds=FRAME_BOUNDS if bounds is None else (1, 1)
        )
        counts_seconds = str(vision_config.get("model_type")).startswith("qwen2_5_vl")
        timing = Timing(
            fps=float(overrides.fps or settings.get("fps") or FPS),
            min_frames=int(settings.get("min_frames") or MIN_FRAMES),
            max_frames=min(int(settings.get("max_frames") or MAX_FRAMES), max_frames),
            depth=int(settings.get("temporal_patch_size") or 2),
            positions_per_second=float(vision_config.get("tokens_per_second", 4)) if counts_seconds else None,
            to_the_end=times is not None,
            by_length=is_glm and overrides.fps is None,
        )
        return cls(frames, timing, bounds, times)

    def within(self, budget: ImageBudget, fps: float | None, usual: UsualSizes | None = None) -> VideoProcessor:
        """Reduce the budget, and set `Timing.fps`.

        usual: limits the area of frames unless `budget` does, and the number of frames unless `fps` is set. Raises
        InvalidRequestError for a larger budget.
        """
        timing = self.timing if fps is None else replace(self.timing, fps=fps, by_length=False)
        if usual is not None and fps is None:
            most = min(timing.max_frames, timing.depth * usual.max_groups())
            timing = replace(timing, max_frames=int(most))
        usual = usual if budget.is_open else None
        return VideoProcessor(self._frames.within(budget), timing, self._bounds, self._times, usual)

    def reduction(self, size: tuple[int, int]) -> float:
        return self._frames.reduction(size)

    def process(
        self, frames: Iterator[DecodedImage], num_frames: int, limits: MediaConfig
    ) -> tuple[Pixels, tuple[int, int]]:
        """Return uint8 ``[frames, 3, height, width]``, and the original width and height.

        Raises InvalidVideoError for frames of different sizes, VideoTooLargeError for too many pixels, and as
        `DynamicResolutionProcessor.process` does.
        """
        processor = self._frames
        if self._usual is not None:
            processor = processor.within(self._usual.frame_budget(math.ceil(num_frames / self.timing.depth)))
        if self._bounds is not None:
            processor = processor.for_video(num_frames, self.timing.depth, self._bounds)
        first = next(frames)
        pixels = processor.process(first)
        if num_frames * pixels[0, 0].size > limits.max_video_pixels:
            raise VideoTooLargeError(
                f"the video has {num_frames} frames of {pixels.shape[3]} x {pixels.shape[2]} pixels, more than "
                f"{limits.max_video_pixels:,} in all; lower its fps or max_pixels"
            )
        video = np.empty((num_frames, *pixels.shape[1:]), pixels.dtype)
        video[0] = pixels[0]
        for index, frame in enumerate(frames, start=1):
            if frame.size != first.size:
                raise InvalidVideoError(
                    f"frame {index} of the video has {frame.size[0]} x {frame.size[1]} pixels, those before it "
                    f"{first.size[0]} x {first.size[1]}; all need one size"
                )
            video[index] = processor.process(frame)[0]
        return video, first.size

    def finish(
        self, key: bytes, pixels: Pixels, own_size: tuple[int, int], rate: float, seconds: Sequence[float]
    ) -> ImageInput:
        """own_size: original width and height. rate: frames per second. seconds: time of each frame."""
        pixels.flags.writeable = False  # other requests may share the video
        frames, rows, columns = self._frames.grid(pixels)
        depth = self.timing.depth
        grid = -(-frames // depth), rows, columns
        text = () if self._times is None else self._times.text(seconds, depth, rows * columns)
        num_tokens = math.prod(grid) + len(text)
        view = whole_view(own_size, pixels.shape[3], pixels.shape[2])
        size = ImageSize(*own_size, view.width, view.height, view.box, num_tokens, frames)
        step, levels = self.timing.frame_step(rate), self._frames.levels
        return ImageInput(key, pixels, num_tokens, grid, step, text=text, size=size, levels=levels)


def prepare_video(
    source: VideoSource, processor: VideoProcessor, limits: MediaConfig, cache: ImageCache, *, salt: str = ""
) -> ImageInput:
    """Trusts `source`: reads paths. salt: part of the key. Raises InvalidVideoError or VideoTooLargeError, and as
    `prepare_image` does for the frames of a list."""
    if isinstance(source, list | tuple):
        return _of_frames(source, processor, limits, cache, salt)
    data = read_video(source, limits)
    key = video_key([data], processor.fingerprint, salt)

    def prepare() -> ImageInput:
        with contextlib.closing(VideoFile(data, limits)) as file:
            indices = processor.timing.sample(file.num_frames, file.rate)
            file.ask(indices[0])
            with contextlib.closing(_frames_of(file, indices, cache.decoding)) as frames:
                pixels, size = processor.process(frames, len(indices), limits)
            rate = len(indices) / file.num_frames * file.rate
        return processor.finish(key, pixels, size, rate, [index / file.rate for index in indices])

    return cache.get(key, prepare)


def _frames_of(file: VideoFile, indices: Sequence[int], memory: DecodingMemory) -> Generator[DecodedImage, None, None]:
    """Each frame takes memory until the next one."""
    for index, ahead in zip_longest(indices, indices[1:]):
        with file.frame(index, memory, ahead) as image:
            yield DecodedImage.whole(image)


def read_video(source: Any, limits: MediaConfig) -> bytes:
    """Trusts `source`: reads paths. Raises InvalidVideoError for other types, and as `read_source` does."""
    if not isinstance(source, str | bytes | os.PathLike):
        raise InvalidVideoError(
            f"a video cannot be made from a {type(source).__name__}; give a file or a list of frames"
        )
    return read_source(source, limits, "video")


def _of_frames(
    frames: Sequence[ImageSource], processor: VideoProcessor, limits: MediaConfig, cache: ImageCache, salt: str
) -> ImageInput:
    opened = open_frames(frames, processor, limits, salt)
    key = video_key([one.key for one in opened], processor.fingerprint, salt)

    def prepare() -> ImageInput:
        with contextlib.closing(_decoded(opened, cache.decoding)) as images:
            pixels, size = processor.process(images, len(opened), limits)
        fps = processor.timing.fps
        return processor.finish(key, pixels, size, fps, [index / fps for index in range(len(opened))])

    return cache.get(key, prepare)


def open_frames(
    frames: Sequence[ImageSource], preprocessing: Preprocessing, limits: MediaConfig, salt: str
) -> list[Opened]:
    """Read the frames of a list without decoding them.

    Raises InvalidVideoError for an empty list, VideoTooLargeError for too many frames or bytes, and as `open_image`
    does.
    """
    if not frames:
        raise InvalidVideoError("the video has no frames")
    if len(frames) > limits.max_video_frames:
        raise VideoTooLargeError(
            f"the video has {len(frames)} frames; at most {limits.max_video_frames} are allowed, send every other one"
        )
    opened: list[Opened] = []
    deadline = time.monotonic() + limits.fetch_timeout
    for frame in frames:
        # All URLs of a video share the time of one fetch.
        left = max(deadline - time.monotonic(), 0.001)
        try:
            own_limits = limits.model_copy(update={"fetch_timeout": left})
            opened.append(open_image(frame, preprocessing, own_limits, salt=salt))
        except ImageFetchError as error:
            if time.monotonic() < deadline:
                raise
            raise ImageFetchError(
                f"the video's frames were not fetched: together they took longer than {limits.fetch_timeout:g} s"
            ) from error
        if sum(one.num_bytes for one in opened) > limits.max_video_bytes:
            raise VideoTooLargeError(
                f"the video's frames have more than {limits.max_video_bytes:,} bytes (--max-video-bytes); send fewer"
            )
    return opened


def _decoded(frames: Sequence[Opened], memory: DecodingMemory) -> Generator[DecodedImage, None, None]:
    for frame in frames:
        with frame.decoded(memory) as image:
            yield image
