"""Reads images, videos and documents from URLs; in Python also from paths, bytes, arrays and PIL images."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy.typing as npt
from PIL import Image

from vlmserve.cancellation import check_cancelled
from vlmserve.errors import ImageFetchError, InvalidImageError, InvalidRequestError
from vlmserve.folders import expanded
from vlmserve.media.arrays import image_of
from vlmserve.media.cache import ImageCache
from vlmserve.media.decoding import DecodingMemory, decoding_bytes
from vlmserve.media.fetch import fetch_file
from vlmserve.media.image_process import ImageProcess
from vlmserve.media.images import (
    DecodedImage,
    decode_data_url,
    decode_opened,
    load_image,
    open_header,
    upright,
)
from vlmserve.media.keys import image_key, pil_image_key
from vlmserve.media.kinds import KINDS, check_num_bytes
from vlmserve.media.local_files import read_allowed_file
from vlmserve.media.processor import ImageProcessor
from vlmserve.settings.config import MediaConfig
from vlmserve.types import ImageInput, ImageSize, MediaKind

ImageSource: TypeAlias = Image.Image | str | os.PathLike[str] | bytes | npt.NDArray[Any]
"""A PIL image, a URL (http, https, data), a path, a file's bytes, or an array or tensor (`arrays.image_of`)."""

DocumentSource: TypeAlias = str | os.PathLike[str] | bytes
"""A URL, a path, or a file's bytes."""

_LONGEST_NAME = 300
"""Maximum characters of a path or URL in an error."""
_OPENED_LOCKS = tuple(threading.Lock() for _ in range(16))
"""The same image object may be given twice, and Pillow reads pixels and EXIF lazily."""


class Preprocessing(Protocol):
    fingerprint: bytes
    """32-byte digest of everything that affects the result."""

    def reduction(self, size: tuple[int, int]) -> float: ...


class Opened(NamedTuple):
    """A file that is read but not decoded."""

    key: bytes
    num_bytes: int
    """Size before decoding."""
    decoded: Callable[[DecodingMemory], contextlib.AbstractContextManager[DecodedImage]]
    """Decodes the image, which takes memory during the block. Raises as `decode_image` does."""


def prepare_image(
    source: ImageSource, processor: ImageProcessor, limits: MediaConfig, cache: ImageCache, *, salt: str = ""
) -> ImageInput:
    """Prepare an image for the vision tower, unless it is in `cache`.

    Trusts `source`: reads paths. salt: part of the key. Raises InvalidImageError, ImageTooLargeError or
    ImageFetchError.
    """
    key, _, decoded = open_image(source, processor, limits, salt=salt)

    def prepare() -> ImageInput:
        with decoded(cache.decoding) as image:
            return process_image(key, image, processor)

    return cache.get(key, prepare)


def open_image(source: ImageSource, preprocessing: Preprocessing, limits: MediaConfig, *, salt: str = "") -> Opened:
    """Trusts `source`: reads paths. Raises as `prepare_image` does."""
    if isinstance(source, str | os.PathLike | bytes):
        data = read_source(source, limits)
        key = image_key(data, preprocessing.fingerprint, salt)
        return Opened(key, len(data), partial(_decoded, data, limits, preprocessing.reduction))
    opened = source if isinstance(source, Image.Image) else image_of(source)
    with _OPENED_LOCKS[id(opened) // 64 % len(_OPENED_LOCKS)]:
        load_image(opened, limits)
        key = pil_image_key(opened, preprocessing.fingerprint, salt)
    num_bytes = opened.width * opened.height * len(opened.getbands())
    return Opened(key, num_bytes, lambda _: contextlib.nullcontext(upright(opened)))


@contextlib.contextmanager
def _decoded(
    data: bytes, limits: MediaConfig, reduction: Callable[[tuple[int, int]], float], memory: DecodingMemory
) -> Iterator[DecodedImage]:
    check_cancelled()
    with (
        contextlib.closing(open_header(data, limits)) as image,
        memory.share(decoding_bytes(image), isolated=isinstance(image, ImageProcess)),
    ):
        yield decode_opened(image, limits, reduction)


def process_image(key: bytes, image: DecodedImage, processor: ImageProcessor) -> ImageInput:
    pixels, placeholders = processor.prepare(image)
    pixels.flags.writeable = False  # other requests may share the image
    view = processor.view(image.size, pixels, placeholders)
    size = ImageSize(*image.size, view.width, view.height, view.box, placeholders.num_tokens)
    return ImageInput(key, pixels, **placeholders._asdict(), size=size, levels=processor.levels)


def is_url(source: str) -> bool:
    return source[:8].lower().startswith(("http://", "https://", "data:", "file://"))


def source_name(source: object) -> str | None:
    """The path or URL of a source, or of a PIL image's file."""
    if isinstance(source, Image.Image):
        source = getattr(source, "filename", "")
    if not isinstance(source, str | os.PathLike):
        return None
    name = os.fsdecode(source)
    return name[:_LONGEST_NAME] if name and name[:5].lower() != "data:" else None


def check_source(source: object) -> None:
    if isinstance(source, os.PathLike) or (isinstance(source, str) and not is_url(source)):
        _existing(os.fsdecode(source), InvalidImageError)


def read_url(url: str, limits: MediaConfig, kind: MediaKind = "image") -> bytes:
    """Raises ImageFetchError unless the URL is http, https, data or file, and as fetching does."""
    if url[:5].lower() == "data:":
        return decode_data_url(url, limits, kind)
    if not is_url(url):
        raise ImageFetchError(f"a {kind}'s URL must begin with http://, https:// or data:")
    if url[:7].lower() == "file://":
        return read_allowed_file(url, limits, kind)
    return fetch_file(url, limits, kind)


def read_source(source: str | os.PathLike[str] | bytes, limits: MediaConfig, kind: MediaKind = "image") -> bytes:
    """Raises as `read_url` does, and the kind's error for an unreadable path."""
    invalid = KINDS[kind].invalid
    if isinstance(source, bytes):
        check_num_bytes(len(source), limits, kind)
        return source
    if isinstance(source, str) and is_url(source):
        return read_url(source, limits, kind)
    path = _existing(source, invalid)
    check_num_bytes(path.stat().st_size, limits, kind)
    try:
        return path.read_bytes()
    except OSError as error:
        raise invalid(f"{path} cannot be read: {error.strerror}") from error


def _existing(source: str | os.PathLike[str], invalid: type[InvalidRequestError]) -> Path:
    try:
        path = expanded(source)
        if path.is_file():
            return path
        problem = f"{path} is not a file" if path.exists() else f"there is no file {path}"
    except (OSError, ValueError) as error:  # the name is too long, or has a null byte
        problem = f"{source!r:.200} is not the path of a file: {error}"
    raise invalid(problem)
