from __future__ import annotations

import io
import math
from collections.abc import Sequence
from functools import cache

import numpy as np
from PIL import Image, ImageDraw

from vlmserve.pixie.fonts import load_font
from vlmserve.pixie.scenes import Item, Scene

Points = list[tuple[float, float]]


@cache
def _unit_circle(count: int) -> tuple[tuple[float, float], ...]:
    return tuple((math.cos(2 * math.pi * i / count), math.sin(2 * math.pi * i / count)) for i in range(count))


@cache
def _unit_heart(count: int) -> tuple[tuple[float, float], ...]:
    points = []
    for i in range(count):
        t = 2 * math.pi * i / count
        y = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        points.append((math.sin(t) ** 3, -(y + 2.5) / 14.5))
    return tuple(points)


def _unit_outline(shape: str, detail: float) -> Sequence[tuple[float, float]]:
    """Return the outline inside the square from -1 to 1. detail: 0 to 1, varies stars and crosses."""
    if shape == "square":
        return (-1, -1), (1, -1), (1, 1), (-1, 1)
    if shape == "triangle":
        return (0, -1), (1, 0.9), (-1, 0.9)
    if shape == "diamond":
        return (0, -1), (1, 0), (0, 1), (-1, 0)
    if shape == "star":
        inner = 0.36 + 0.14 * detail
        radii = (1.0, inner) * 5
        return [(r * math.sin(math.pi * i / 5), -r * math.cos(math.pi * i / 5)) for i, r in enumerate(radii)]
    if shape == "cross":
        a = 0.22 + 0.18 * detail
        return (
            *((-a, -1), (a, -1), (a, -a), (1, -a), (1, a), (a, a)),
            *((a, 1), (-a, 1), (-a, a), (-1, a), (-1, -a), (-a, -a)),
        )
    if shape == "heart":
        return _unit_heart(36)
    return _unit_circle(36)


def outline_points(item: Item) -> Points:
    """The outline in pixels of the image; for a ring, the outer one."""
    x, y = item.centre
    half_width, half_height = item.size[0] / 2, item.size[1] / 2
    cos, sin = math.cos(math.radians(item.angle)), math.sin(math.radians(item.angle))
    scaled = [(px * half_width, py * half_height) for px, py in _unit_outline(item.shape, item.detail)]
    return [(x + cos * px - sin * py, y + sin * px + cos * py) for px, py in scaled]


def _ring_share(item: Item) -> float:
    return 0.1 + 0.1 * item.detail


def ring_width(item: Item) -> float:
    """The width of a ring's band, in pixels of the image."""
    return max(2.0, min(item.size) * _ring_share(item))


def _draw_item(draw: ImageDraw.ImageDraw, item: Item, scale: int) -> None:
    side = min(item.size) * scale
    if item.shape in ("circle", "ring"):
        (x, y), (width, height) = item.centre, item.size
        box = tuple(scale * v for v in (x - width / 2, y - height / 2, x + width / 2, y + height / 2))
        if item.shape == "ring":
            draw.ellipse(box, outline=item.rgb, width=max(2, round(side * _ring_share(item))))
        else:
            draw.ellipse(box, fill=item.rgb, outline=item.outline, width=max(1, round(side * 0.03)))
        return
    points = [(scale * x, scale * y) for x, y in outline_points(item)]
    draw.polygon(points, fill=item.rgb)
    if item.outline is not None:
        draw.line([*points, points[0]], fill=item.outline, width=max(1, round(side * 0.03)))


def _canvas(scene: Scene, scale: int) -> Image.Image:
    width, height = scene.size[0] * scale, scene.size[1] * scale
    if scene.gradient is None:
        return Image.new("RGB", (width, height), scene.background)
    strip = Image.new("RGB", (1, 2))
    strip.putpixel((0, 0), scene.background)
    strip.putpixel((0, 1), scene.gradient)
    return strip.resize((width, height), Image.Resampling.BILINEAR)


def draw_scene(scene: Scene) -> Image.Image:
    """Draw the scene in its own size, as an RGB image."""
    scale = 2 if scene.antialias and scene.writing is None else 1
    image = _canvas(scene, scale)
    draw = ImageDraw.Draw(image)
    for item in scene.items:
        _draw_item(draw, item, scale)
    if scene.writing is not None:
        font = load_font(scene.writing.font, scene.writing.font_size)
        draw.text(scene.writing.origin, scene.writing.text, fill=scene.writing.rgb, font=font)
    if scale > 1:
        image = image.resize(scene.size, Image.Resampling.BOX)
    if scene.noise:
        rng = np.random.default_rng(scene.seed)
        pixels = np.asarray(image, dtype=np.float32)
        pixels = pixels + rng.normal(0, scene.noise, pixels.shape).astype(np.float32)
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    if scene.jpeg_quality is not None:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=scene.jpeg_quality)
        image = Image.open(buffer).convert("RGB")
    return image
