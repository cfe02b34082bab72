"""Reliability plots of decisions: accuracy by probability, as an SVG or as a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from typing import Final

from vlmserve.pixie.reliability import HEADINGS, Calibration, bins

_SIZE, _MARGIN = 300, 44
_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 44rem; margin: 2rem auto; padding: 0 1rem; }
svg { width: 100%; max-width: 26rem; height: auto; }
table { border-collapse: collapse; }
th, td { padding: 0.2rem 0.8rem; border-bottom: 1px solid #ccc; text-align: right; }
th:first-child { text-align: left; }
"""


def to_svg(calibration: Calibration) -> str:
    """A reliability plot: accuracy by probability, before and after fitting."""
    end = _SIZE - 12

    def x(value: float) -> float:
        return _MARGIN + (end - _MARGIN) * value

    def y(value: float) -> float:
        return _SIZE - _MARGIN - (end - _MARGIN) * value

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_SIZE}" height="{_SIZE}" font-family="sans-serif" '
        'font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<line x1="{x(0)}" y1="{y(0)}" x2="{x(1)}" y2="{y(1)}" stroke="#bbb" stroke-dasharray="4"/>',
        f'<rect x="{x(0)}" y="{y(1)}" width="{x(1) - x(0)}" height="{y(0) - y(1)}" fill="none" stroke="#444"/>',
        f'<text x="{x(0.5)}" y="{_SIZE - 8}" text-anchor="middle">probability of the answer</text>',
        f'<text transform="translate(12,{y(0.5)}) rotate(-90)" text-anchor="middle">accuracy</text>',
    ]
    for tick in (0.0, 0.5, 1.0):
        lines.append(f'<text x="{x(tick)}" y="{y(0) + 14}" text-anchor="middle">{tick:g}</text>')
        lines.append(f'<text x="{x(0) - 6}" y="{y(tick) + 4}" text-anchor="end">{tick:g}</text>')
    curves = (
        ("#b3261e", 1.0, "temperature 1"),
        ("#1b4f9c", calibration.temperature, f"{calibration.temperature:.2f}, fitted"),
    )
    for number, (colour, temperature, label) in enumerate(curves):
        found = bins(calibration.checked, temperature)
        points = " ".join(f"{x(one.confidence):.1f},{y(one.accuracy):.1f}" for one in found)
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        for one in found:
            at = f'cx="{x(one.confidence):.1f}" cy="{y(one.accuracy):.1f}"'
            lines.append(f'<circle {at} r="3" fill="{colour}"><title>{one.count} answers</title></circle>')
        lines.append(f'<text x="{x(0) + 8}" y="{y(1) + 16 + 14 * number}" fill="{colour}">{label}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def to_html(calibration: Calibration, model: str) -> str:
    """A page with the plot and the table, without other files or scripts."""
    title = f"Calibration of {escape(model)}"
    heading = "".join(f'<th scope="col">{escape(name)}</th>' for name in HEADINGS)
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>\n'
        for name, *cells in calibration.rows
    )
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n<h1>{title}</h1>\n"
        f"<p>Fitted temperature: {calibration.temperature:.3f}. The plot and the table are about questions that it was "
        f"not fitted to.</p>\n{to_svg(calibration)}"
        f"<table>\n<thead><tr>{heading}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table>\n</html>\n"
    )


WRITERS: Final[Mapping[str, Callable[[Calibration, str], str]]] = {
    ".svg": lambda calibration, model: to_svg(calibration),
    ".html": to_html,
}
"""Plots by file suffix. The second argument names the model."""
