from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

from PIL import ImageFont

from vlmserve.pixie.printed_text import CHARACTERS

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

#: As `DECLARED_FONTS`; fonts that documents are printed in besides those, in training and in evaluation.
DOCUMENT_FONTS: Final[dict[str, tuple[str, ...]]] = {
    "font_rhd": ("files/RedHatDisplay-Regular.ttf", "files/RedHatDisplay-Bold.ttf"),
    "ttf_opensans": ("ttf/OpenSans-Regular.ttf", "ttf/OpenSans-SemiBold.ttf", "ttf/OpenSans-Italic.ttf"),
    "font_roboto": ("files/Roboto-Light.ttf", "files/Roboto-Italic.ttf", "files/Roboto-Black.ttf"),
    "font_lato": ("files/Lato-Light.ttf", "files/Lato-Italic.ttf", "files/Lato-Black.ttf"),
    "font_source_sans_pro": ("files/SourceSansPro-Light.ttf", "files/SourceSansPro-It.ttf"),
    "font_source_serif_pro": ("files/SourceSerifPro-Semibold.ttf", "files/SourceSerifPro-It.ttf"),
    "font_hanken_grotesk": ("files/HankenGrotesk-Medium.otf",),
}

#: As `DECLARED_FONTS`; fonts that only the evaluation of documents prints in.
HELD_OUT_FONTS: Final[dict[str, tuple[str, ...]]] = {
    "font_manrope": ("files/Manrope-Regular.ttf", "files/Manrope-Bold.ttf"),
    "font_fjallaone": ("files/FjallaOne-Regular.ttf",),
    "matplotlib": ("mpl-data/fonts/ttf/STIXGeneral.ttf", "mpl-data/fonts/ttf/STIXGeneralBol.ttf"),
}

#: The name of Pillow's own font, which is always available.
BUILTIN_FONT: Final[str] = "Pillow"


def _installed(declared: Mapping[str, tuple[str, ...]]) -> list[str]:
    """The file paths of declared fonts whose package is installed."""
    found: list[str] = []
    for package, files in declared.items():
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        folder = Path(spec.origin).parent
        found.extend(str(folder / name) for name in files if (folder / name).is_file())
    return found


@cache
def available_fonts() -> tuple[str, ...]:
    """``"Pillow"`` first, then file paths in declared order."""
    return (BUILTIN_FONT, *_installed(DECLARED_FONTS))


added_fonts: list[str] = []
"""File paths of `add_document_fonts`."""


@cache
def document_fonts(*, new: bool = False) -> tuple[str, ...]:
    """new: fonts that training never shows; Pillow's own if there are none."""
    if new:
        return tuple(_installed(HELD_OUT_FONTS)) or (BUILTIN_FONT,)
    return (*available_fonts(), *_installed(DOCUMENT_FONTS), *added_fonts)


def add_document_fonts(folder: Path) -> int:
    """Print documents also in the fonts of a folder; return their number.

    Fonts that lack a character, or whose small letters are capital ones, are left out.
    """
    added_fonts.extend(str(file) for file in sorted(folder.glob("*.[tow]*f*")) if _has_all_characters(str(file)))
    document_fonts.cache_clear()
    return len(added_fonts)


def _has_all_characters(name: str) -> bool:
    masks = {character: bytes(load_font(name, 40).getmask(character)) for character in (*CHARACTERS, "\uffff")}
    return len(set(masks.values())) == len(masks)


def held_out_fonts_are_missing() -> bool:
    return len(_installed(HELD_OUT_FONTS)) < sum(map(len, HELD_OUT_FONTS.values()))


@cache
def load_font(name: str, size: int) -> ImageFont.FreeTypeFont:
    """name: from `available_fonts`. size: pixels per em."""
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
