"""Plot quantized models' KL divergence over memory and speed, as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 420, 300
LEFT, RIGHT, TOP, BOTTOM = 60, 90, 34, 44
LINE = 13
"""Minimum pixels between two labels."""
COLOURS = ("#444444", "#1b4f9c", "#b3261e", "#2e7d32", "#8e24aa", "#c77700", "#00838f", "#6d4c41")


@dataclass(frozen=True)
class Point:
    name: str
    megabytes: float
    divergence: float
    """From the original model, in nats per token."""
    rate: float | None = None
    """Tokens per second of one request."""


def quality_plot(points: Sequence[Point], title: str) -> str:
    """Plot over MB, and over tokens per second if all points have a rate. points: at least one."""
    panels: list[tuple[str, Callable[[Point], float]]] = [("MB of weights", lambda point: point.megabytes)]
    if all(point.rate is not None for point in points):
        panels.append(("tokens a second of one answer", lambda point: point.rate or 0.0))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH * len(panels)}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="16" font-size="12">{escape(title)}</text>',
    ]
    for number, (label, of) in enumerate(panels):
        lines.append(f'<g transform="translate({number * WIDTH},0)">')
        lines += _panel(points, label, of)
        lines.append("</g>")
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(points: Sequence[Point], label: str, of: Callable[[Point], float]) -> list[str]:
    across, up = _ticks(max(map(of, points))), _ticks(max(point.divergence for point in points))
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def x(value: float) -> float:
        return LEFT + (right - LEFT) * value / across[-1]

    def y(value: float) -> float:
        return bottom - (bottom - TOP) * value / up[-1]

    lines = []
    for tick in across:
        lines.append(f'<line x1="{x(tick):.1f}" y1="{TOP}" x2="{x(tick):.1f}" y2="{bottom}" stroke="#ddd"/>')
        lines.append(f'<text x="{x(tick):.1f}" y="{bottom + 14}" text-anchor="middle">{tick:,g}</text>')
    for tick in up:
        lines.append(f'<line x1="{LEFT}" y1="{y(tick):.1f}" x2="{right}" y2="{y(tick):.1f}" stroke="#ddd"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    lines.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 10}" text-anchor="middle">{label}</text>')
    middle = (TOP + bottom) / 2
    lines.append(f'<text transform="translate(14,{middle}) rotate(-90)" text-anchor="middle">KL divergence</text>')
    heights = _spread([y(point.divergence) for point in points])
    for number, (point, height) in enumerate(zip(points, heights, strict=True)):
        colour, at, own = COLOURS[number % len(COLOURS)], x(of(point)), y(point.divergence)
        lines.append(f'<circle cx="{at:.1f}" cy="{own:.1f}" r="4" fill="{colour}"/>')
        lines.append(
            f'<line x1="{at:.1f}" y1="{own:.1f}" x2="{right + 6}" y2="{height:.1f}" stroke="{colour}" '
            'stroke-opacity="0.4"/>'
        )
        lines.append(f'<text x="{right + 8}" y="{height + 4:.1f}" fill="{colour}">{escape(point.name[:14])}</text>')
    return lines


def _ticks(largest: float) -> list[float]:
    if largest <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(largest))
    step = next(factor * power for factor in (0.2, 0.5, 1.0, 2.0) if factor * power * 5 >= largest)
    return [round(number * step, 12) for number in range(math.ceil(largest / step - 1e-9) + 1)]


def _spread(heights: Sequence[float]) -> list[float]:
    """Place labels near their points' heights, without overlap."""
    order = sorted(range(len(heights)), key=lambda number: -heights[number])
    placed = [0.0] * len(heights)
    lowest = float(HEIGHT - BOTTOM)
    for number in order:
        placed[number] = min(heights[number], lowest)
        lowest = placed[number] - LINE
    return placed
