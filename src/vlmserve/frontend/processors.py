"""How the checkpoint's images and videos become pixels, by what its files say."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from vlmserve.config import MediaConfig
from vlmserve.errors import ConfigurationError, InvalidRequestError, ModelLoadError, UnsupportedModelError
from vlmserve.frontend.frames import VideosAsImages
from vlmserve.media.any_size import AnySizeProcessor, kind_of
from vlmserve.media.budget import NO_BUDGET, ImageBudget
from vlmserve.media.cache import ImageCache
from vlmserve.media.crops import CropProcessor
from vlmserve.media.frame_forms import SmolVLMFrames, TimedFrames
from vlmserve.media.frame_times import FrameTimes
from vlmserve.media.grids import GridProcessor
from vlmserve.media.images import DecodedImage
from vlmserve.media.processor import FixedSizeProcessor, ImageProcessor, implied_settings
from vlmserve.media.rows import RowProcessor
from vlmserve.media.sources import process_image
from vlmserve.media.tiles import AnyResolutionProcessor, SplitProcessor, SplitWords
from vlmserve.media.transformers_processor import TransformersProcessor
from vlmserve.media.videos import VideoProcessor
from vlmserve.prompt.files import read_json
from vlmserve.prompt.tokenizer import Tokenizer

_SMALL_IMAGE = (64, 64)


def transformers_processor(folder: Path, tokenizer: Tokenizer, media: MediaConfig) -> ImageProcessor:
    """Of a model that runs by transformers' code. Raises UnsupportedModelError without a placeholder token."""
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
    """Of a model of vlmserve. Raises ModelLoadError for a checkpoint without settings, ConfigurationError for a budget
    that it cannot keep."""
    processor = _own_processor(folder, tokenizer, media)
    if isinstance(processor, AnySizeProcessor):  # whose budget may be larger than the checkpoint's
        return processor
    with _of_server():
        return processor.within(server_budget(media))


def server_budget(media: MediaConfig) -> ImageBudget:
    """Of every image."""
    return ImageBudget.of(media.mm_processor_kwargs.model_dump())


def _own_processor(folder: Path, tokenizer: Tokenizer, media: MediaConfig) -> ImageProcessor:
    config = read_json(folder / "config.json")
    if config.get("model_type") == "moondream1":
        return CropProcessor(config, exact_pixels=media.exact_pixels)
    settings = _settings(folder, "image_processor", "preprocessor_config.json") or implied_settings(config)
    if not settings:
        raise ModelLoadError(f"{folder} has neither preprocessor_config.json nor an image processor's settings")
    kind, exact = str(settings.get("image_processor_type")), media.exact_pixels
    if kind_of(settings) is not None:
        return AnySizeProcessor.from_settings(settings, exact_pixels=exact, overrides=media.mm_processor_kwargs)
    if kind.startswith("LlavaNextImageProcessor"):
        return AnyResolutionProcessor(config, settings, exact_pixels=exact)
    if kind.startswith(("Idefics3", "SmolVLM")):
        count = read_json(folder / "processor_config.json").get("image_seq_len")
        return SplitProcessor(config, settings, _split_words(tokenizer), tile_tokens=count, exact_pixels=exact)
    if kind.startswith("GotOcr2"):
        count = read_json(folder / "processor_config.json").get("image_seq_length")
        around = _tokens_of(tokenizer, {"start_image_token": "<img>", "end_image_token": "</img>"})
        return GridProcessor(config, settings, around, tile_tokens=count, exact_pixels=exact)
    if kind.startswith("Pixtral"):
        sizes = read_json(folder / "processor_config.json")
        usual = {"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
        ends = _tokens_of(tokenizer, {name: sizes.get(name, token) for name, token in usual.items()})
        return RowProcessor(config, settings, ends, sizes=sizes, exact_pixels=exact)
    return FixedSizeProcessor(config, settings, exact_pixels=exact)


@contextlib.contextmanager
def _of_server() -> Iterator[None]:
    """Errors about a budget are about the server's settings."""
    try:
        yield
    except InvalidRequestError as error:
        raise ConfigurationError(f"--mm-processor-kwargs: {error}") from error


def _split_words(tokenizer: Tokenizer) -> SplitWords:
    assert tokenizer.image_token is not None
    assert tokenizer.image_token_id is not None
    named = tokenizer.special_tokens
    around = named.get("fake_image_token", "<fake_token_around_image>")
    if tokenizer.token_id(around) is None:
        raise ModelLoadError(f"the tokenizer has no token {around}, which is needed around the tiles of images")
    return SplitWords(
        encode=partial(tokenizer.encode, add_special_tokens=False),
        image_token=tokenizer.image_token,
        image_token_id=tokenizer.image_token_id,
        around=around,
        whole=named.get("global_image_token", "<global-img>"),
    )


def _tokens_of(tokenizer: Tokenizer, names: dict[str, str]) -> tuple[int, int]:
    """Ids of the two tokens beside an image's placeholders. names: as the tokenizer may name them, and what they are
    if it does not."""
    ids = []
    for name, usual in names.items():
        token = tokenizer.special_tokens.get(name, usual)
        token_id = tokenizer.token_id(token)
        if token_id is None:
            raise ModelLoadError(f"the tokenizer has no token {token}, which is needed beside images")
        ids.append(token_id)
    return ids[0], ids[1]


def video_processor(folder: Path, tokenizer: Tokenizer, media: MediaConfig) -> VideoProcessor:
    """Of a model that takes videos."""
    times = None
    if tokenizer.frame_ends is not None:
        encode = partial(tokenizer.encode, add_special_tokens=False)
        times = FrameTimes(encode, *tokenizer.frame_ends, behind=tokenizer.frames_are_images)
    settings = _settings(folder, "video_processor", "video_preprocessor_config.json", "preprocessor_config.json")
    return VideoProcessor.from_settings(
        settings,
        read_json(folder / "config.json").get("vision_config") or {},
        exact_pixels=media.exact_pixels,
        overrides=media.mm_processor_kwargs,
        max_frames=media.max_video_frames,
        times=times,
    )


def videos_as_images(
    folder: Path, tokenizer: Tokenizer, media: MediaConfig, processor: ImageProcessor, cache: ImageCache
) -> VideosAsImages:
    """Of a model that takes images and no videos. processor: of its images."""
    fps = media.mm_processor_kwargs.fps
    settings = _settings(folder, "video_processor", "video_preprocessor_config.json", "preprocessor_config.json")
    form = SmolVLMFrames.from_settings(settings, fps) if isinstance(processor, SplitProcessor) else None
    if form is None:
        return VideosAsImages(TimedFrames(fps), processor, media, cache)
    # The size that a frame gets before it becomes a tile need not be that of images.
    size = settings.get("size") or (settings.get("video_sampling") or {}).get("video_size")
    frames = {**settings, "size": size, "do_image_splitting": False}
    config = read_json(folder / "config.json")
    words = _split_words(tokenizer)
    return VideosAsImages(form, SplitProcessor(config, frames, words, exact_pixels=media.exact_pixels), media, cache)


def _settings(folder: Path, section: str, *files: str) -> dict[str, Any]:
    """A section of processor_config.json, or else the first of the files that older checkpoints have for it."""
    settings = read_json(folder / "processor_config.json").get(section)
    if isinstance(settings, dict):
        return settings
    return next((found for name in files if (found := read_json(folder / name))), {})
