"""Cuts pages into tiles as Granite Docling does: InternVL's grids, with Idefics3's tokens around tiles."""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any, Self

from vlmserve.errors import UnsupportedModelError
from vlmserve.media.grids import GridProcessor
from vlmserve.media.image_files import ImageFiles
from vlmserve.media.processor import Placeholders, given
from vlmserve.media.tiles import SplitWords, check_tile_tokens, expanded
from vlmserve.types import Pixels

_MOST_SIDE = 16
"""Maximum tiles along each side: the tokenizer has no tokens for more."""
_DEFAULTS: dict[str, Any] = {"size": {"height": 512, "width": 512}, "max_patches": 32}


class DoclingProcessor(GridProcessor):
    version = "docling v1"
    most_side = _MOST_SIDE

    @classmethod
    def from_files(cls, files: ImageFiles) -> Self:
        settings = {**_DEFAULTS, **given(files.settings)}
        for name in ("fine_route", "dense_max_patches"):
            if settings.get(name):
                raise UnsupportedModelError(f"the image processor's {name} is not supported; remove it")
        if not settings.get("crop_to_patches", True):
            settings |= {"min_patches": 1, "max_patches": 1}
        vision = {"image_size": 512, "patch_size": 16, "scale_factor": 4, **(files.config.get("vision_config") or {})}
        made = cls({"vision_config": vision}, settings, (0, 0), exact_pixels=files.exact_pixels)
        made._follow_words(SplitWords.of(files), files, vision["patch_size"] * vision["scale_factor"])
        return made

    def _follow_words(self, words: SplitWords, files: ImageFiles, square: int) -> None:
        """square: pixels along each side of an embedding."""
        tile = self._recipe.tile
        self._tile_tokens, self._words = (tile // square) ** 2, words
        check_tile_tokens(tile, files.processor_config.get("image_seq_len"), self._tile_tokens, "image_seq_len")
        self._written = lru_cache(256)(self._write)

    def placeholders(self, pixels: Pixels, size: tuple[int, int]) -> Placeholders:
        width, height = self._target(size)
        return self._written(height // self._recipe.tile, width // self._recipe.tile)

    def _num_tokens(self, count: int) -> int:
        pairs = ((rows, count // rows) for rows in range(1, count + 1) if count % rows == 0)
        return max((self._written(*pair).num_tokens for pair in pairs if max(pair) <= _MOST_SIDE), default=0)

    def _write(self, rows: int, columns: int) -> Placeholders:
        words = self._words
        if rows == columns == 1:
            tokens = words.encode(f"{words.around}<row_1_col_1>{words.image_token}\n")
        else:
            tokens = words.tokens(rows, columns)
        count, text = expanded(tokens, words.image_token_id, itertools.repeat(self._tile_tokens))
        return Placeholders(count, text=text)
