"""How long HEIC and AVIF images take to decode in a process of their own, beside the libraries in this process.

    .venv/bin/python -m benchmarks.image_decoding

Both ways take turns on the same files, whose images are smooth with a little noise. Reported are medians.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
from collections.abc import Callable

import numpy as np
import pillow_heif
from PIL import Image

from vlmserve.media.images import decode_image
from vlmserve.settings.config import MediaConfig

_SIZES = ((1152, 864), (4032, 3024))
_PER_MEGAPIXEL = 60
"""Turns for images of one megapixel; larger ones have fewer."""


def make_image(width: int, height: int) -> Image.Image:
    """An image in RGB."""
    random = np.random.default_rng(0)
    coarse = random.integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), np.int16)
    return Image.fromarray((smooth + random.integers(-4, 5, smooth.shape)).clip(0, 255).astype(np.uint8))


def encode(image: Image.Image, format: str) -> bytes:
    """The image as a file."""
    file = io.BytesIO()
    if format == "HEIC":
        pillow_heif.from_pillow(image).save(file, format="HEIF", quality=60)
    else:
        image.save(file, "AVIF", quality=60, speed=9)
    return file.getvalue()


def decode_here(data: bytes) -> None:
    """Decode it in this process."""
    image = pillow_heif.HeifImageFile(io.BytesIO(data)) if data[8:12] == b"heic" else Image.open(io.BytesIO(data))
    image.load()


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=_PER_MEGAPIXEL, help="for an image of one megapixel")
    turns = parser.parse_args().turns
    limits = MediaConfig()
    for width, height in _SIZES:
        for format in ("HEIC", "AVIF"):
            data = encode(make_image(width, height), format)
            decode_image(data, limits)
            pairs = [
                (seconds(lambda: decode_here(data)), seconds(lambda: decode_image(data, limits)))  # noqa: B023
                for _ in range(max(3, round(turns * 1e6 / (width * height))))
            ]
            here, apart = (1000 * statistics.median(times) for times in zip(*pairs, strict=True))
            print(f"{format}, {width} x {height}: {here:.0f} ms in this process, {apart:.0f} ms in one of its own")


if __name__ == "__main__":
    main()
