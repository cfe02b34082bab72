"""Prepares media of requests and checks their limits."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias

from PIL import Image

from vlmserve.errors import CapacityError, InvalidRequestError, InvalidRequestsError, TooManyImagesError
from vlmserve.frontend.frames import VideosAsImages
from vlmserve.frontend.messages import Medium
from vlmserve.frontend.processors import server_budget
from vlmserve.media.budget import NO_BUDGET
from vlmserve.media.cache import ImageCache
from vlmserve.media.documents import Page, PageCounts
from vlmserve.media.images import DecodedImage
from vlmserve.media.processor import ImageProcessor
from vlmserve.media.sources import check_source, prepare_image, source_name
from vlmserve.media.usual_sizes import UsualSizes
from vlmserve.media.video_frames import Frame
from vlmserve.media.videos import VideoProcessor, prepare_video
from vlmserve.settings.config import MediaConfig
from vlmserve.types import ImageInput, ModelInfo

logger = logging.getLogger(__name__)

KnownMedia: TypeAlias = dict[tuple[Any, ...], tuple[Medium, ImageInput]]
"""Prepared media, by `_identity` and the request's wishes."""

_SMALL_IMAGE = (64, 64)
_NO_TOWER = ": it is a GGUF file without a vision tower; if that has a file of its own, give it with --mmproj"
_LARGE_SIDE = 16_384
"""Pixels of the side of an image that is larger than any model sees."""
_LARGE_ENCODER_CACHE = 64 * 1024**2
"""Bytes; an encoder cache of this size holds a small image of every model."""


class MediaPreparer:
    """Prepares media for one checkpoint. Thread-safe."""

    def __init__(
        self, config: MediaConfig, processor: ImageProcessor | None, encoder_cache_memory: int, *, in_one_file: bool
    ) -> None:
        """processor: None for a model without images. in_one_file: the checkpoint is a GGUF file."""
        self.config = config
        self._processor, self._encoder_cache_memory = processor, encoder_cache_memory
        self.video_processor: VideoProcessor | None = None
        self.videos_as_images: VideosAsImages | None = None
        """Shows videos to a model that takes only images."""
        self.usual: UsualSizes | None = None
        """Image sizes by cost, once the engine has reported its limits."""
        self.image_cache = ImageCache(config.image_cache_memory, config.decode_memory, config.threads)
        self.page_counts = PageCounts()
        self._blind = _NO_TOWER if in_one_file else ""

    def fit(self, info: ModelInfo) -> None:
        """Adopt the engine's limits. Raises CapacityError if its encoder cache cannot hold a small image."""
        self.usual = UsualSizes.of(self.config, info.image_cost)
        if self._processor is not None and self.usual is not None:
            usual = self._processor.within(self.usual.for_images(NO_BUDGET))
            logger.info("Images: %s", self.usual.described(limits=usual is not self._processor))
        self.check_cache(info.image_token_bytes)

    def check_cache(self, embedding_bytes: int) -> None:
        """Raise CapacityError if the encoder cache cannot hold a small image. embedding_bytes: of an image token."""
        if self._processor is None or self._encoder_cache_memory >= _LARGE_ENCODER_CACHE:
            return
        _, placeholders = self._processor.prepare(DecodedImage.whole(Image.new("RGB", _SMALL_IMAGE)))
        needed = placeholders.num_tokens * embedding_bytes
        if needed > self._encoder_cache_memory:
            raise CapacityError(
                f"--encoder-cache-memory {self._encoder_cache_memory}: too small for any image; one of "
                f"{_SMALL_IMAGE[0]} x {_SMALL_IMAGE[1]} pixels takes {needed:,} bytes"
            )

    def useful_pixels(self) -> int | None:
        """Area above which a larger image shows the model nothing more, if known."""
        if self._processor is None:
            return None
        usual = NO_BUDGET if self.usual is None else self.usual.for_images(NO_BUDGET)
        ratio = self._processor.within(usual).reduction((_LARGE_SIDE, _LARGE_SIDE))
        return round((_LARGE_SIDE / ratio) ** 2) if ratio > 1 else None

    def label(self, index: int) -> Sequence[int]:
        return () if self._processor is None else self._processor.label(index)

    @property
    def supports_images(self) -> bool:
        return self._processor is not None

    @property
    def supports_videos(self) -> bool:
        """True for native videos and for images of frames."""
        return self.video_processor is not None or self.videos_as_images is not None

    def check(self, media: Sequence[Medium]) -> None:
        """Check the number of media of each kind. Page counts are unknown here."""
        kinds = Counter(medium.kind for medium in media)
        if kinds["document"] and not self.supports_images:
            raise TooManyImagesError(
                f"this model takes no documents, because it takes no images{self._blind}", param="messages"
            )
        self.check_images(kinds["image"], param="messages")
        self.check_videos(kinds["video"], param="messages")

    def check_images(self, count: int, param: str) -> None:
        if count and not self.supports_images:
            raise TooManyImagesError(f"this model takes no images{self._blind}; send text only", param=param)
        if count > self.config.max_images:
            raise TooManyImagesError(
                f"the request has {count} images; at most {self.config.max_images} are allowed (--max-images)",
                param=param,
            )

    def check_videos(self, count: int, param: str) -> None:
        if count and not self.supports_videos:
            raise TooManyImagesError("this model takes no videos; send images or text", param=param)
        if count > self.config.max_videos:
            raise TooManyImagesError(
                f"the request has {count} videos; at most {self.config.max_videos} are allowed (--max-videos)",
                param=param,
            )

    def prepare_all(self, media: Sequence[Medium], salt: str, known: KnownMedia | None = None) -> list[ImageInput]:
        """known: media prepared earlier with the same salt; this call adds to it.

        Raises the first error, or all errors if a caller in this process gave the media.
        """
        known = {} if known is None else known
        prepared: list[ImageInput] = []
        errors: list[InvalidRequestError] = []
        for medium in media:
            try:
                key = _identity(medium)
                if key not in known:
                    known[key] = medium, self.prepare(medium, salt)
                prepared.append(known[key][1])
            except InvalidRequestError as error:
                if not medium.is_local:
                    raise
                errors.append(error)
        _raise(errors)
        return prepared

    def prepare(self, medium: Medium, salt: str) -> ImageInput:
        try:
            image = self._read(medium, salt)
            server_budget(self.config).narrowed(medium.budget).check_kept(image)
            return image
        except InvalidRequestError as error:
            error.param = error.param or medium.place
            error.source = error.source or source_name(medium.source)
            raise

    def _read(self, medium: Medium, salt: str) -> ImageInput:
        if isinstance(medium.source, Frame):
            return medium.source.prepare(self.image_cache)
        if medium.kind == "video":
            assert self.video_processor is not None
            fps = medium.fps or self.config.mm_processor_kwargs.fps
            videos = self.video_processor.within(medium.budget, fps, self.usual)
            return prepare_video(medium.source, videos, self.config, self.image_cache, salt=salt)
        assert self._processor is not None
        budget = medium.budget if self.usual is None else self.usual.for_images(medium.budget)
        processor = self._processor.within(budget)
        if isinstance(medium.source, Page):
            return medium.source.prepare(processor, self.image_cache)
        return prepare_image(medium.source, processor, self.config, self.image_cache, salt=salt)


def check_sources(sources: Sequence[tuple[str, Any]]) -> None:
    """Raise InvalidRequestError for paths without a file. sources: (place in the request, source) pairs."""
    errors: list[InvalidRequestError] = []
    for place, source in sources:
        try:
            for one in source if isinstance(source, list | tuple) else [source]:
                check_source(one)
        except InvalidRequestError as error:
            error.param, error.source = place, source_name(source)
            errors.append(error)
    _raise(errors)


def _identity(medium: Medium) -> tuple[Any, ...]:
    """A key while the source exists: the name of a URL, path, page or frame, else the object's id."""
    source = medium.source
    if isinstance(source, Frame):
        named: Any = source.opened.key
    else:
        named = source if isinstance(source, str | Page) else id(source)
    return medium.kind, named, medium.budget, medium.fps


def _raise(errors: Sequence[InvalidRequestError]) -> None:
    if errors:
        raise errors[0] if len(errors) == 1 else InvalidRequestsError(errors)
