from __future__ import annotations

import io
import math
import random

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from vlmserve.pixie.documents import Background, Document, Mark
from vlmserve.pixie.fonts import load_font


def _canvas(background: Background, size: tuple[int, int], rng: random.Random) -> Image.Image:
    image = Image.new("RGB", size, background.first)
    width, height = size
    draw = ImageDraw.Draw(image)
    if background.style == "gradient":
        small = Image.new("RGB", (2, 2), background.first)
        small.putpixel(rng.choice(((0, 1), (1, 0), (1, 1))), background.second)
        return small.resize(size, Image.Resampling.BILINEAR)
    if background.style == "stripes":
        step, slant = rng.randint(6, 40), rng.choice((0, 0, height, -height))
        for x in range(-height, width + height, 2 * step):
            draw.polygon([(x, 0), (x + step, 0), (x + step + slant, height), (x + slant, height)], background.second)
    elif background.style == "blobs":
        for _ in range(rng.randint(3, 14)):
            left, top, radius = rng.uniform(0, width), rng.uniform(0, height), rng.uniform(4, 0.3 * max(size))
            box = left - radius, top - radius, left + radius, top + rng.uniform(0.3, 1) * radius
            rng.choice((draw.ellipse, draw.rectangle))(box, background.second)
    elif background.style == "noise":
        cell = rng.choice((2, 4, 8, 16))
        cells = np.random.default_rng(rng.getrandbits(32)).random((height // cell + 1, width // cell + 1, 1))
        blend = np.array(background.first) * cells + np.array(background.second) * (1 - cells)
        small = Image.fromarray(blend.astype(np.uint8))
        how = rng.choice((Image.Resampling.NEAREST, Image.Resampling.BILINEAR))
        return small.resize((small.width * cell, small.height * cell), how).crop((0, 0, width, height))
    return image


def _draw_mark(draw: ImageDraw.ImageDraw, mark: Mark) -> None:
    left, top, right, bottom = mark.box
    if mark.kind == "rectangle":
        draw.rectangle(mark.box, fill=mark.rgb)
    elif mark.kind == "frame":
        draw.rectangle(mark.box, outline=mark.rgb, width=2)
    elif mark.kind == "rule":
        step = 6 if mark.value else max(1, math.ceil(right - left))
        for start in range(round(left), round(right), 2 * step):
            draw.line((start, top, min(right, start + step), bottom), fill=mark.rgb, width=1)
    elif mark.kind == "dial":
        draw.arc(mark.box, 150, 390, fill=mark.rgb, width=3)
        for step in range(11):
            _spoke(draw, mark, step / 10, 0.88, 1.0, 2)
    else:
        _spoke(draw, mark, mark.value, 0.0, 0.8, 3)


def _spoke(draw: ImageDraw.ImageDraw, mark: Mark, value: float, start: float, end: float, width: int) -> None:
    left, top, right, bottom = mark.box
    x, y, radius = (left + right) / 2, (top + bottom) / 2, (right - left) / 2
    angle = math.radians(150 + 240 * value)
    cos, sin = math.cos(angle) * radius, math.sin(angle) * radius
    draw.line((x + cos * start, y + sin * start, x + cos * end, y + sin * end), fill=mark.rgb, width=width)


def draw_document(document: Document) -> Image.Image:
    """Draw the document in its own size, as an RGB image."""
    image = _canvas(document.background, document.size, random.Random(document.seed))
    draw = ImageDraw.Draw(image)
    for mark in document.marks:
        _draw_mark(draw, mark)
    for line in document.lines:
        draw.text(line.origin, line.text, fill=line.rgb, font=load_font(line.font, line.font_size), anchor="ls")
    if document.noise:
        rng = np.random.default_rng(document.seed)
        pixels: npt.NDArray[np.float32] = np.asarray(image, dtype=np.float32)
        pixels = pixels + document.noise * rng.standard_normal(pixels.shape, dtype=np.float32)
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    if document.jpeg_quality is not None:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=document.jpeg_quality)
        image = Image.open(buffer).convert("RGB")
    return image
