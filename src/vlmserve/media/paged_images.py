"""Image files with several images: pages of a TIFF, frames of an animation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from vlmserve.cancellation import check_cancelled
from vlmserve.errors import DocumentTooLargeError, InvalidImageError, VLMServeError
from vlmserve.media.decoding import DecodingMemory, decoding_bytes
from vlmserve.media.image_process import ImageProcess
from vlmserve.media.images import (
    DecodedImage,
    check_num_pixels,
    decode_process,
    in_process,
    load_image,
    open_file,
    upright,
)
from vlmserve.media.pages import has_several
from vlmserve.settings.config import MediaConfig

_ANIMATIONS = ("GIF", "WEBP", "PNG")


class PagedImage:
    """Pages or frames of an image file. Opening reads only headers.

    Raises InvalidImageError, ImageTooLargeError or DocumentTooLargeError as `decode_image` does.
    """

    def __init__(self, data: bytes, limits: MediaConfig) -> None:
        self._limits = limits
        self._image = open_file(data, limits)
        try:
            several = has_several(self._image)
            if several and self._image.format in _ANIMATIONS:
                self._check_frames()
                # A frame depends on all earlier ones, so it may take long.
                self._image = in_process(self._image, data, limits)
            if isinstance(self._image, ImageProcess):
                self._image.share_time()
            self.num_pages = self._image.n_frames if several and isinstance(self._image, ImageProcess) else 1
            if self.num_pages > limits.max_decoded_frames:
                raise DocumentTooLargeError(f"the file has more than {limits.max_decoded_frames:,} pages or frames")
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def decoded(self, number: int, memory: DecodingMemory) -> Iterator[DecodedImage]:
        """A page takes memory during the block. Raises as `decode_image` does."""
        check_cancelled()
        image = self._image
        if isinstance(image, ImageProcess):  # its process has its own memory limit
            self._go_to(number)
            decode_process(image)
        else:
            with memory.share(decoding_bytes(image)):
                self._go_to(number)
        with memory.share(decoding_bytes(image)):
            load_image(image, self._limits)
            yield upright(image)

    def _go_to(self, number: int) -> None:
        try:
            self._image.seek(number)
        except VLMServeError:
            raise
        except Exception as error:  # Pillow raises anything on broken data
            raise InvalidImageError(f"it is broken or truncated: {error}") from error
        check_num_pixels(self._image, self._limits)

    def close(self) -> None:
        self._image.close()

    def _check_frames(self) -> None:
        width, height = self._image.size
        if width * height > self._limits.max_frame_pixels:
            raise DocumentTooLargeError(
                f"the animation's frames have {width:,} x {height:,} pixels; "
                f"at most {self._limits.max_frame_pixels:,} are allowed (--max-frame-pixels)"
            )
