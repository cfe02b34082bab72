"""Finds files with more than one image, and refuses them where only the first would reach the model."""

from __future__ import annotations

from PIL import Image

from vlmserve.errors import InvalidImageError, VLMServeError

_MOST_COUNTED = 1000
"""Pages that a message counts."""
_SUBFILE_TYPE = 254
_NO_PAGE = 0b101
"""Bits of a TIFF's NewSubfileType: a smaller version of another page, or a mask of one (TIFF 6.0, page 36)."""


def check_single(image: Image.Image) -> None:
    """Raises InvalidImageError for an opened file with several pages, or an animation. Only headers are read."""
    if image.format == "TIFF":
        count = len(page_frames(image, _MOST_COUNTED))
        if count > 1:
            number = f"more than {_MOST_COUNTED:,}" if count > _MOST_COUNTED else count
            raise InvalidImageError(
                f'the TIFF file has {number} pages; send it as a part of type "file", or each page as an image'
            )
    elif has_several(image):
        if image.format == "HEIF":
            raise InvalidImageError(
                f'the HEIC file has {getattr(image, "n_frames", 0):,} images; send it as a part of type "file"'
            )
        # Of a GIF, counting them takes a pass over the file.
        frames = "" if image.format == "GIF" else f" of {getattr(image, 'n_frames', 0):,} frames"
        raise InvalidImageError(
            f"the {image.format} file is an animation{frames}; send one frame as an image, "
            'several as the frames of a video, or the file as a part of type "file"'
        )


def has_several(image: Image.Image) -> bool:
    """Whether an opened file has several pages or is an animation. Only headers are read.

    The later pictures of an MPO file, as phones write them, are previews, depth or other views of the first.
    Raises InvalidImageError for a file whose pages or frames cannot be found.
    """
    if image.format == "TIFF":
        return len(page_frames(image, 1)) > 1
    if image.format == "MPO":
        return False
    try:
        return bool(getattr(image, "is_animated", False))
    except VLMServeError:
        raise
    except Exception as error:  # Pillow's readers raise anything on broken data
        raise InvalidImageError(f"the image is broken: {error}") from error


def page_frames(image: Image.Image, most: int) -> list[int]:
    """Which frames of an opened TIFF are pages, up to one more than `most`. Smaller versions of a page and masks are
    none."""
    pages, frame = [0], 1
    while len(pages) <= most and frame < 2 * most and _goes_to(image, frame):
        kind = image.tag_v2.get(_SUBFILE_TYPE)  # type: ignore[attr-defined]
        if not (isinstance(kind, int) and kind & _NO_PAGE):
            pages.append(frame)
        frame += 1
    if not _goes_to(image, 0):
        raise InvalidImageError("the image is broken: its first page cannot be read again")
    return pages


def _goes_to(image: Image.Image, frame: int) -> bool:
    """Whether there is such a page that can be read."""
    try:
        image.seek(frame)
    except VLMServeError:
        raise
    except Exception:  # Pillow's readers raise anything on broken headers
        return False
    return True
