"""Images for the models that run by transformers' code: its processors, asked about one image at a time."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from vlmserve.errors import InvalidImageError, UnsupportedModelError
from vlmserve.media.images import DecodedImage
from vlmserve.media.processor import ImageProcessor, PixelLimits, Placeholders, refuse_limits, to_rgb
from vlmserve.types import FurtherInputs, NamedArray, Pixels

PIXELS = "pixel_values"
_OF_TEXT = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels"})
_TYPES_OF_TOKENS = ("token_type_ids", "mm_token_type_ids")
_FILES = ("preprocessor_config.json", "processor_config.json", "tokenizer.json")


class TransformersProcessor(ImageProcessor):
    """A checkpoint's own processor.

    image_token_id: of what takes an embedding of an image in a prompt. mark: what stands for an image in a text.
    Raises UnsupportedModelError for a checkpoint that transformers has no processor for.
    """

    def __init__(self, folder: Path, image_token_id: int) -> None:
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
        for path in (folder / name for name in _FILES):
            digest.update(path.read_bytes() if path.is_file() else b"")
        self.fingerprint = digest.digest()
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        self._has_grids = "mrope_section" in (getattr(config.get_text_config(), "rope_parameters", None) or {})
        # Tokenizers change their settings while they are called.
        self._lock = threading.Lock()

    def within(self, limits: PixelLimits) -> Self:
        refuse_limits(limits)
        return self

    def reduction(self, size: tuple[int, int]) -> float:
        """Images are decoded in full."""
        return 1.0

    def prepare(self, decoded: DecodedImage) -> tuple[Pixels, Placeholders]:
        """What the processor makes of a text that is one image."""
        inputs = self._process(decoded)
        # One that begins the whole prompt is not the image's.
        ids = _before(np.asarray(inputs["input_ids"])[0], self._bos_token_id)
        text = tuple((int(place), int(ids[place])) for place in np.flatnonzero(ids != self._image_token_id))
        arrays = tuple(
            _named(name, np.asarray(value)) for name, value in inputs.items() if name not in {PIXELS, *_OF_TEXT}
        )
        further = FurtherInputs(len(ids) - len(text), arrays)
        pixels = np.array(inputs[PIXELS], np.float32)
        return pixels, Placeholders(len(ids), grid=self._grid(inputs), tiling=further, text=text)

    def token_types(self, decoded: DecodedImage) -> dict[str, int]:
        """Which type the model's inputs give to an image's placeholders, by the names of those inputs; all others have
        0."""
        inputs = self._process(decoded)
        place = int(np.flatnonzero(np.asarray(inputs["input_ids"])[0] == self._image_token_id)[0])
        return {name: int(np.asarray(inputs[name])[0, place]) for name in _TYPES_OF_TOKENS if name in inputs}

    def _grid(self, inputs: Mapping[str, Any]) -> tuple[int, int, int] | None:
        """Of the embeddings, of which each stands for a square of patches."""
        if not self._has_grids or "image_grid_thw" not in inputs:
            return None
        merged = int(self._processor.image_processor.merge_size)
        frames, rows, columns = (int(count) for count in np.asarray(inputs["image_grid_thw"])[0])
        return frames, rows // merged, columns // merged

    def _process(self, decoded: DecodedImage) -> Mapping[str, Any]:
        try:
            with self._lock:
                inputs: Mapping[str, Any] = self._processor(
                    text=[self.mark], images=[to_rgb(decoded.image)], return_tensors="np",
                    add_special_tokens=False,
                )  # fmt: skip
        except (ValueError, TypeError, ZeroDivisionError, IndexError) as error:
            raise InvalidImageError(f"the model's processor cannot take this image: {error}") from error
        return inputs


def _before(ids: npt.NDArray[np.int64], end: int | None) -> npt.NDArray[np.int64]:
    """What lies before the first `end`."""
    ends = np.flatnonzero(ids == end)
    return ids[: ends[0]] if ends.size else ids


def _named(name: str, value: np.ndarray[Any, Any]) -> NamedArray:
    return NamedArray(name, value.dtype.name, value.shape, value.tobytes())
