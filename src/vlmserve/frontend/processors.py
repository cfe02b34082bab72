"""Image and video processors of a checkpoint."""

from __future__ import annotations

import contextlib
import pkgutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from vlmserve.errors import ConfigurationError, InvalidRequestError, ModelLoadError, UnsupportedModelError
from vlmserve.families.registry import image_processor_path, vision_config, vision_family
from vlmserve.frontend.frames import VideosAsImages
from vlmserve.media.budget import NO_BUDGET, ImageBudget
from vlmserve.media.cache import ImageCache
from vlmserve.media.dynamic_resolution import DynamicResolutionProcessor
from vlmserve.media.frame_forms import AdjacentFrames, ClockedFrames, SmolVLMFrames, TimedFrames
from vlmserve.media.frame_times import FrameTimes
from vlmserve.media.image_files import ImageFiles
from vlmserve.media.images import DecodedImage
from vlmserve.media.pooled import PooledProcessor
from vlmserve.media.processor import ImageProcessor
from vlmserve.media.slices import SliceProcessor
from vlmserve.media.sources import process_image
from vlmserve.media.tiles import SplitProcessor
from vlmserve.media.transformers_processor import TransformersProcessor
from vlmserve.media.videos import VideoProcessor
from vlmserve.prompt.files import read_config, read_json
from vlmserve.prompt.tokenizer import Tokenizer
from vlmserve.settings.config import MediaConfig

_SMALL_IMAGE = (64, 64)


def transformers_processor(folder: Path, tokenizer: Tokenizer, media: MediaConfig) -> ImageProcessor:
    """Raises UnsupportedModelError without a placeholder token."""
    if tokenizer.image_token_id is None:
        raise UnsupportedModelError("it has no placeholder token for images, so it cannot run by transformers' code")
    budget = server_budget(media)
    processor = TransformersProcessor(folder, tokenizer.image_token_id, budget)
    tokenizer.mark_images(processor.mark)
    if budget != NO_BUDGET:
        with _of_server():
            budget.check_kept(process_image(b"", DecodedImage.whole(Image.new("RGB", _SMALL_IMAGE)), processor))
    return processor


def image_processor(folder: Path, tokenizer: Tokenizer, media: MediaConfig) -> ImageProcessor:
    """Processor for vlmserve's own models. Raises ModelLoadError for missing settings, ConfigurationError for an
    impossible budget.
    """
    processor = _own_processor(folder, tokenizer, media)
    if isinstance(processor, DynamicResolutionProcessor):  # its budget may exceed the checkpoint's
        return processor
    with _of_server():
        return processor.within(server_budget(media))


def server_budget(media: MediaConfig) -> ImageBudget:
    return ImageBudget.of(media.mm_processor_kwargs.model_dump())


def _own_processor(folder: Path, tokenizer: Tokenizer, media: MediaConfig) -> ImageProcessor:
    files = _image_files(folder, tokenizer, media)
    if not files.settings:
        raise ModelLoadError(f"{folder} has no preprocessor_config.json: copy it from the model's repository")
    kind = files.settings.get("image_processor_type")
    make = pkgutil.resolve_name(image_processor_path(kind, vision_family(files.config)))
    processor: ImageProcessor = make(files)
    return processor


def _image_files(folder: Path, tokenizer: Tokenizer, media: MediaConfig) -> ImageFiles:
    config = read_config(folder)
    settings = _settings(folder, "image_processor", "preprocessor_config.json")
    family = vision_family(config)
    if not settings and family is not None:
        settings = dict(family.image_settings(config))
    elif family is not None and family.image_processor_types and settings.get("image_processor_type") is None:
        settings = {**settings, "image_processor_type": family.image_processor_types[0]}
    return ImageFiles(config, settings, read_json(folder / "processor_config.json"), tokenizer, media)


@contextlib.contextmanager
def _of_server() -> Iterator[None]:
    """Errors about a budget name the server's settings."""
    try:
        yield
    except InvalidRequestError as error:
        raise ConfigurationError(f"--mm-processor-kwargs: {error}") from error


def video_processor(folder: Path, tokenizer: Tokenizer, media: MediaConfig) -> VideoProcessor:
    times = None
    if tokenizer.frame_ends is not None:
        encode = partial(tokenizer.encode, add_special_tokens=False)
        times = FrameTimes(encode, *tokenizer.frame_ends, time_follows=tokenizer.frames_are_images)
    settings = _settings(folder, "video_processor", "video_preprocessor_config.json", "preprocessor_config.json")
    return VideoProcessor.from_settings(
        settings,
        vision_config(read_config(folder)),
        exact_pixels=media.exact_pixels,
        overrides=media.mm_processor_kwargs,
        max_frames=media.max_video_frames,
        times=times,
    )


def videos_as_images(
    folder: Path, tokenizer: Tokenizer, media: MediaConfig, processor: ImageProcessor, cache: ImageCache
) -> VideosAsImages:
    """processor: the model's image processor."""
    fps = media.mm_processor_kwargs.fps
    settings = _settings(folder, "video_processor", "video_preprocessor_config.json", "preprocessor_config.json")
    if isinstance(processor, SliceProcessor) and processor.on_canvas:
        files = replace(_image_files(folder, tokenizer, media), settings=settings)
        adjacent = AdjacentFrames.from_settings(settings, fps)
        return VideosAsImages(adjacent, SliceProcessor.from_files(files).for_frames, media, cache)
    if isinstance(processor, PooledProcessor):
        return VideosAsImages(ClockedFrames.from_settings(settings, fps), processor, media, cache)
    form = SmolVLMFrames.from_settings(settings, fps) if isinstance(processor, SplitProcessor) else None
    if form is None:
        return VideosAsImages(TimedFrames(fps), processor, media, cache)
    # The size of a frame before it becomes a tile may differ from an image's.
    size = settings.get("size") or (settings.get("video_sampling") or {}).get("video_size")
    frames = {**settings, "size": size, "do_image_splitting": False}
    files = replace(_image_files(folder, tokenizer, media), settings=frames, processor_config={})
    return VideosAsImages(form, SplitProcessor.from_files(files), media, cache)


def _settings(folder: Path, section: str, *files: str) -> dict[str, Any]:
    """A section of processor_config.json, else the first of older checkpoints' `files` that exists."""
    settings = read_json(folder / "processor_config.json").get(section)
    if isinstance(settings, dict):
        return settings
    return next((found for name in files if (found := read_json(folder / name))), {})
