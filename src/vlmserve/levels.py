"""Pixel normalization. Pixels are sent as uint8 and normalized on the device."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt


class Levels(msgspec.Struct, frozen=True):
    """``(rescale * level - mean) / std`` by channel; None skips a term."""

    rescale: float | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None

    def table(self) -> npt.NDArray[np.float32]:
        """The normalized value of each uint8 level, ``[3, 256]``, rounded as in Transformers."""
        levels = np.arange(256, dtype=np.float32)
        if self.rescale is not None:
            levels = (np.arange(256, dtype=np.float64) * self.rescale).astype(np.float32)
        table = np.repeat(levels[None], 3, axis=0)
        if self.mean is not None and self.std is not None:
            means, deviations = (np.array(values, dtype=np.float32)[:, None] for values in (self.mean, self.std))
            table = (table - means) / deviations
        return table
