"""Pictures for the models that run by transformers' code: its processors, asked about one picture at a time."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Self

import numpy as np
from blake3 import blake3

from vlmserve.errors import InvalidImageError, UnsupportedModelError
from vlmserve.media.pictures import Picture
from vlmserve.media.processor import PictureProcessor, PixelLimits, Placeholders, refuse_limits, to_rgb
from vlmserve.types import FurtherInputs, NamedArray, Pixels

PIXELS = "pixel_values"
_OF_TEXT = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
_FILES = ("preprocessor_config.json", "processor_config.json", "tokenizer.json")


class TransformersProcessor(PictureProcessor):
    """A checkpoint's own processor.

    image_token_id: of what takes an embedding of a picture in a prompt. mark: what stands for a picture in a text.
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
            raise UnsupportedModelError(f"transformers has no processor for its pictures: {reason}") from error
        if getattr(self._processor, "image_processor", None) is None:
            raise UnsupportedModelError(f"{type(self._processor).__name__} takes no pictures")
        self.mark = str(self._processor.image_token)
        digest = blake3(f"transformers {transformers.__version__}".encode())
        for path in (folder / name for name in _FILES):
            digest.update(path.read_bytes() if path.is_file() else b"")
        self.fingerprint = digest.digest()
        # Tokenizers change their settings while they are called.
        self._lock = threading.Lock()

    def within(self, limits: PixelLimits) -> Self:
        refuse_limits(limits)
        return self

    def reduction(self, size: tuple[int, int]) -> float:
        """Pictures are decoded in full."""
        return 1.0

    def prepare(self, picture: Picture) -> tuple[Pixels, Placeholders]:
        """What the processor makes of a text that is one picture."""
        try:
            with self._lock:
                inputs = self._processor(
                    text=[self.mark], images=[to_rgb(picture.image)], return_tensors="np",
                    add_special_tokens=False,
                )  # fmt: skip
        except (ValueError, TypeError, ZeroDivisionError, IndexError) as error:
            raise InvalidImageError(f"the model's processor cannot take this picture: {error}") from error
        ids = np.asarray(inputs["input_ids"])[0]
        text = tuple((int(place), int(ids[place])) for place in np.flatnonzero(ids != self._image_token_id))
        arrays = tuple(
            _named(name, np.asarray(value)) for name, value in inputs.items() if name not in {PIXELS, *_OF_TEXT}
        )
        further = FurtherInputs(len(ids) - len(text), arrays)
        return np.array(inputs[PIXELS], np.float32), Placeholders(len(ids), tiling=further, text=text)


def _named(name: str, value: np.ndarray[Any, Any]) -> NamedArray:
    return NamedArray(name, value.dtype.name, value.shape, value.tobytes())
