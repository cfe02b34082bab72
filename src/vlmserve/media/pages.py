"""Detect and reject files with several images."""

from __future__ import annotations

from PIL import Image

from vlmserve.errors import InvalidImageError, VLMServeError


def check_single(image: Image.Image) -> None:
    """Raise InvalidImageError for several pages or an animation. Reads only headers."""
    if not has_several(image):
        return
    count = getattr(image, "n_frames", 0)
    if image.format == "TIFF":
        raise InvalidImageError(
            f'the TIFF file has {count:,} pages; send it as a part of type "file", or each page as an image'
        )
    if image.format == "HEIF":
        raise InvalidImageError(f'the HEIC file has {count:,} images; send it as a part of type "file"')
    raise InvalidImageError(
        f"the {image.format} file is an animation of {count:,} frames; send one frame, a video of frames, "
        'or a part of type "file"'
    )


def has_several(image: Image.Image) -> bool:
    """True for several pages or an animation. Reads only headers.

    Later pictures of a JPEG do not count: phones write previews, depth or other views. Raises InvalidImageError for
    broken pages or frames.
    """
    try:
        return bool(getattr(image, "is_animated", False))
    except VLMServeError:
        raise
    except Exception as error:  # Pillow raises anything on broken data
        raise InvalidImageError(f"the image is broken: {error}") from error
