"""Image files that hold several images: pages of a TIFF, frames of an animation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from vlmserve.cancellation import check_cancelled
from vlmserve.config import MediaConfig
from vlmserve.errors import DocumentTooLargeError, InvalidImageError, VLMServeError
from vlmserve.media.decoding import DecodingMemory, LimitedFile, check_scans, decoding_bytes
from vlmserve.media.image_process import ImageProcess
from vlmserve.media.images import DecodedImage, check_num_pixels, decode_process, load_image, open_file, upright
from vlmserve.media.pages import has_several, page_frames

_ANIMATIONS = ("GIF", "WEBP", "PNG")


class PagedImage:
    """An image file, of which every page or frame can be decoded. Only headers are read when it is opened.

    Raises InvalidImageError, ImageTooLargeError or DocumentTooLargeError as `decode_image` does.
    """

    def __init__(self, data: bytes, limits: MediaConfig) -> None:
        self._limits = limits
        self._data = data
        self._file = LimitedFile(data, limits.decode_timeout)
        self._image = open_file(self._file, limits)
        try:
            self._use_process()
            if self._image.format == "TIFF":
                self._frames = page_frames(self._image, limits.max_decoded_frames)
            else:
                self._frames = list(range(self._num_frames()))
            if len(self._frames) > limits.max_decoded_frames:
                raise DocumentTooLargeError(f"the file has more than {limits.max_decoded_frames:,} pages or frames")
        except BaseException:
            self.close()
            raise
        self.num_pages = len(self._frames)

    @contextlib.contextmanager
    def decoded(self, number: int, memory: DecodingMemory) -> Iterator[DecodedImage]:
        """A page, which takes its share of the memory while the block runs. Raises as `decode_image` does."""
        check_cancelled()
        image = self._image
        self._file.restart()
        if isinstance(image, ImageProcess):  # whose process has its own limit of memory
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
            self._image.seek(self._frames[number])
        except VLMServeError:
            raise
        except Exception as error:  # Pillow's readers raise anything on broken data
            raise InvalidImageError(f"it is broken or truncated: {error}") from error
        check_num_pixels(self._image, self._limits)
        check_scans(self._data, self._image, self._limits)

    def close(self) -> None:
        """Let go of the file."""
        self._image.close()

    def _use_process(self) -> None:
        """Decode animations in a process: a frame is drawn on all before it, which takes any time."""
        image = self._image
        if image.format in _ANIMATIONS and has_several(image):
            if image.width * image.height > self._limits.max_frame_pixels:
                raise DocumentTooLargeError(
                    f"the animation's frames have {image.width:,} x {image.height:,} pixels; "
                    f"at most {self._limits.max_frame_pixels:,} are allowed (--max-frame-pixels)"
                )
            data = self._file.getvalue()
            image.close()
            self._image = self._in_process(data, image.format, image.width * image.height)
        if isinstance(self._image, ImageProcess):
            self._image.share_time()

    def _in_process(self, data: bytes, format: str, num_pixels: int) -> ImageProcess:
        try:
            return ImageProcess(data, format, self._limits, num_pixels)
        except VLMServeError:
            raise
        except Exception as error:  # as Pillow's readers do on broken data
            raise InvalidImageError(f"the image is broken: {error}") from error

    def _num_frames(self) -> int:
        if not has_several(self._image):
            return 1
        try:
            return int(getattr(self._image, "n_frames", 1))
        except VLMServeError:
            raise
        except Exception as error:  # Pillow's readers raise anything on broken data
            raise InvalidImageError(f"the image is broken: {error}") from error
