"""Fonts for numbers and words."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Final

from PIL import ImageFont

#: ``package: font files``. The package is importable under this name if its distribution is installed.
DECLARED_FONTS: Final[dict[str, tuple[str, ...]]] = {
    "matplotlib": tuple(
        f"mpl-data/fonts/ttf/{name}.ttf"
        for name in ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono", "DejaVuSerif", "DejaVuSerif-Bold")
    ),
    "font_roboto": ("files/Roboto-Regular.ttf", "files/Roboto-Bold.ttf"),
    "font_source_sans_pro": ("files/SourceSansPro-Regular.ttf", "files/SourceSansPro-Bold.ttf"),
    "font_source_serif_pro": ("files/SourceSerifPro-Regular.ttf", "files/SourceSerifPro-Bold.ttf"),
    "font_hanken_grotesk": ("files/HankenGrotesk-Regular.otf", "files/HankenGrotesk-Bold.otf"),
    "font_fredoka_one": ("files/FredokaOne-Regular.ttf",),
    "font_caladea": ("files/Caladea-Regular.ttf", "files/Caladea-Bold.ttf"),
    "font_lato": ("files/Lato-Regular.ttf", "files/Lato-Bold.ttf"),
}

#: The name of Pillow's own font, which is always available.
BUILTIN_FONT: Final[str] = "Pillow"


@cache
def available_fonts() -> tuple[str, ...]:
    """Return the installed fonts: ``"Pillow"`` first, then file paths in declared order."""
    found = [BUILTIN_FONT]
    for package, files in DECLARED_FONTS.items():
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        folder = Path(spec.origin).parent
        found.extend(str(folder / name) for name in files if (folder / name).is_file())
    return tuple(found)


@cache
def load_font(name: str, size: int) -> ImageFont.FreeTypeFont:
    """Load a font from `available_fonts`. size: pixels per em."""
    if name == BUILTIN_FONT:
        font = ImageFont.load_default(size)
        if not isinstance(font, ImageFont.FreeTypeFont):
            raise RuntimeError("Pillow was built without FreeType, which pixie's text images need")
        return font
    return ImageFont.truetype(name, size, layout_engine=ImageFont.Layout.BASIC)


@cache
def advance(name: str, character: str) -> float:
    """The advance width of a character, in ems."""
    return load_font(name, 100).getlength(character) / 100
