"""Random reproducible images, about as hard to compress as photos."""

from __future__ import annotations

import base64
import io
import re
from typing import Literal

import numpy as np
from PIL import Image

from vlmserve.errors import ConfigurationError

MAX_SIDE = 16_384
_DETAIL = ((8, 90.0), (48, 30.0), (256, 10.0))
"""Grid cells per side and amplitude of each noise layer, from coarse to fine."""


def parse_image_size(text: str) -> tuple[int, int]:
    """Width and height in pixels. Raises ConfigurationError."""
    match = re.fullmatch(r"\s*(\d+)\s*[x*,]\s*(\d+)\s*", text)
    if match is None or not all(0 < int(side) <= MAX_SIDE for side in match.groups()):
        raise ConfigurationError(f"--image-size {text!r} is not an image size; write WIDTHxHEIGHT, like 640x480")
    return int(match[1]), int(match[2])


def random_image(draw: np.random.Generator, size: tuple[int, int], kind: Literal["jpeg", "png"]) -> bytes:
    """A file of random colors. size: (width, height) in pixels."""
    pixels = np.full((size[1], size[0], 3), 128.0, np.float32)
    for cells, strength in _DETAIL:
        grid = (min(cells, size[1]), min(cells, size[0]), 3)
        noise = Image.fromarray(draw.integers(0, 256, grid, np.uint8)).resize(size, Image.Resampling.BICUBIC)
        pixels += (np.asarray(noise, np.float32) / 127.5 - 1) * strength
    file = io.BytesIO()
    options = {"quality": 85} if kind == "jpeg" else {"compress_level": 1}
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, kind, **options)
    return file.getvalue()


def data_url(file: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(file).decode()}"
