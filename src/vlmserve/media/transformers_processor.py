"""Preprocesses images with Transformers' processors, one at a time, for the Transformers backend."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from vlmserve.errors import InvalidImageError, UnsupportedModelError
from vlmserve.media.budget import HIGH_DETAIL, NO_BUDGET, ImageBudget
from vlmserve.media.images import DecodedImage
from vlmserve.media.processor import ImageProcessor, Placeholders, View, to_rgb, whole_view
from vlmserve.media.transformers_budget import edge_of, largest_area, low_detail, settings_within, view_of
from vlmserve.types import FurtherInputs, NamedArray, Pixels

PIXELS = "pixel_values"
_OF_TEXT = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels"})
_TYPES_OF_TOKENS = ("token_type_ids", "mm_token_type_ids")
_FILES = ("preprocessor_config.json", "processor_config.json", "tokenizer.json")


class TransformersProcessor(ImageProcessor):
    """A checkpoint's own processor.

    image_token_id: placeholder of an image's embedding. mark: stands for an image in a text. Raises
    UnsupportedModelError for a checkpoint without a processor in transformers.
    """

    levels = None

    def __init__(self, folder: Path, image_token_id: int, budget: ImageBudget = NO_BUDGET) -> None:
        import transformers

        self._image_token_id = image_token_id
        try:
            self._processor: Any = transformers.AutoProcessor.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except (ValueError, KeyError, OSError, ImportError, AttributeError) as error:
            reason = " ".join(str(error).split())
            raise UnsupportedModelError(f"transformers has no processor for its images: {reason}") from error
        if getattr(self._processor, "image_processor", None) is None:
            raise UnsupportedModelError(f"{type(self._processor).__name__} takes no images")
        self.mark = str(self._processor.image_token)
        self._bos_token_id: int | None = self._processor.tokenizer.bos_token_id
        digest = blake3(f"transformers {transformers.__version__}".encode())
        digest.update(repr(budget).encode())
        for path in (folder / name for name in _FILES):
            digest.update(path.read_bytes() if path.is_file() else b"")
        self.fingerprint = digest.digest()
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        self._has_grids = "mrope_section" in (getattr(config.get_text_config(), "rope_parameters", None) or {})
        # Calls change a tokenizer's settings.
        self._lock = threading.Lock()
        self._budget = budget

    def within(self, budget: ImageBudget) -> Self:
        """`prepare` applies the budget. Raises InvalidRequestError for pixels above the limit."""
        budget.check_limit(largest_area(self._processor.image_processor, self._budget) or sys.maxsize)
        if budget.low_detail:
            budget = low_detail(self._processor.image_processor, self._budget, budget)
        if budget in (NO_BUDGET, HIGH_DETAIL):
            return self
        bound = copy(self)
        bound._budget = replace(self._budget.narrowed(budget), low_detail=budget.low_detail)
        bound.fingerprint = blake3(self.fingerprint + repr(bound._budget).encode()).digest()
        return bound

    def reduction(self, size: tuple[int, int]) -> float:
        return 1.0

    def prepare(self, decoded: DecodedImage) -> tuple[Pixels, Placeholders]:
        """Use a text with one image, with the largest size within the budget."""
        inputs = self._within_budget(decoded)
        ids = self._ids(inputs)
        text = tuple((int(place), int(ids[place])) for place in np.flatnonzero(ids != self._image_token_id))
        arrays = tuple(
            _named(name, np.asarray(value)) for name, value in inputs.items() if name not in {PIXELS, *_OF_TEXT}
        )
        further = FurtherInputs(len(ids) - len(text), arrays)
        pixels = np.array(inputs[PIXELS], np.float32)
        return pixels, Placeholders(len(ids), grid=self._grid(inputs), tiling=further, text=text)

    def view(self, size: tuple[int, int], pixels: Pixels, placeholders: Placeholders) -> View:
        further = placeholders.tiling
        arrays = further.arrays if isinstance(further, FurtherInputs) else ()
        return self._view(size, pixels, {named.name: _array(named) for named in arrays})

    def token_types(self, decoded: DecodedImage) -> dict[str, int]:
        """The type of an image's placeholders by name of the model's type inputs; other tokens have type 0."""
        inputs = self._process(decoded)
        place = int(np.flatnonzero(np.asarray(inputs["input_ids"])[0] == self._image_token_id)[0])
        return {name: int(np.asarray(inputs[name])[0, place]) for name in _TYPES_OF_TOKENS if name in inputs}

    def _within_budget(self, decoded: DecodedImage) -> Mapping[str, Any]:
        """Bisect for the largest settings within the budget; else use the smallest."""
        if self._budget == NO_BUDGET:
            return self._process(decoded)
        choices = settings_within(self._processor.image_processor, self._budget)
        if self._budget.low_detail:
            return self._process(decoded, choices[0])

        def fits(inputs: Mapping[str, Any]) -> bool:
            width, height, _ = self._view(decoded.size, np.asarray(inputs[PIXELS]), inputs)
            tile = math.prod(np.asarray(inputs[PIXELS]).shape[-2:])
            pixels = width * height if width and height else _num_tiles(inputs[PIXELS]) * tile
            return self._budget.allows(pixels, len(self._ids(inputs)))

        best = self._process(decoded, choices[-1])
        if len(choices) == 1 or fits(best):
            return best
        best, low, high = self._process(decoded, choices[0]), 0, len(choices) - 1
        while high - low > 1:
            middle = (low + high) // 2
            if fits(inputs := self._process(decoded, choices[middle])):
                best, low = inputs, middle
            else:
                high = middle
        return best

    def _ids(self, inputs: Mapping[str, Any]) -> npt.NDArray[np.int64]:
        return _before(np.asarray(inputs["input_ids"])[0], self._bos_token_id)

    def _view(self, size: tuple[int, int], pixels: Pixels, inputs: Mapping[str, Any]) -> View:
        processor = self._processor.image_processor
        if "image_grid_thw" in inputs:
            _, rows, columns = (int(count) for count in np.asarray(inputs["image_grid_thw"])[0])
            patch = edge_of(processor, "patch_size")
            return whole_view(size, columns * patch, rows * patch)
        return view_of(processor, size, _num_tiles(pixels), (pixels.shape[-1], pixels.shape[-2]))

    def _grid(self, inputs: Mapping[str, Any]) -> tuple[int, int, int] | None:
        if not self._has_grids or "image_grid_thw" not in inputs:
            return None
        merged = int(self._processor.image_processor.merge_size)
        frames, rows, columns = (int(count) for count in np.asarray(inputs["image_grid_thw"])[0])
        return frames, rows // merged, columns // merged

    def _process(self, decoded: DecodedImage, settings: Mapping[str, Any] = {}) -> Mapping[str, Any]:
        try:
            with self._lock:
                inputs: Mapping[str, Any] = self._processor(
                    text=[self.mark], images=[to_rgb(decoded.image)], return_tensors="np",
                    add_special_tokens=False, **settings,
                )  # fmt: skip
        except (ValueError, TypeError, ZeroDivisionError, IndexError) as error:
            raise InvalidImageError(f"the model's processor cannot take this image: {error}") from error
        return inputs


def _before(ids: npt.NDArray[np.int64], end: int | None) -> npt.NDArray[np.int64]:
    ends = np.flatnonzero(ids == end)
    return ids[: ends[0]] if ends.size else ids


def _named(name: str, value: np.ndarray[Any, Any]) -> NamedArray:
    return NamedArray(name, value.dtype.name, value.shape, value.tobytes())


def _array(named: NamedArray) -> npt.NDArray[Any]:
    return np.frombuffer(named.data, named.dtype).reshape(named.shape)


def _num_tiles(pixels: npt.ArrayLike) -> int:
    return math.prod(np.asarray(pixels).shape[:-3])
