"""What becomes of the levels of pixels, which are sent as they are and normalized where a tower reads them."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt


class Levels(msgspec.Struct, frozen=True):
    """``(rescale * level - mean) / std``, channel by channel; None: that part is left out."""

    rescale: float | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None

    def table(self) -> npt.NDArray[np.float32]:
        """What each of the 256 levels of each of the 3 channels becomes, ``[3, 256]``; rounded as transformers'
        processors round it."""
        levels = np.arange(256, dtype=np.float32)
        if self.rescale is not None:
            levels = (np.arange(256, dtype=np.float64) * self.rescale).astype(np.float32)
        table = np.repeat(levels[None], 3, axis=0)
        if self.mean is not None and self.std is not None:
            means, deviations = (np.array(values, dtype=np.float32)[:, None] for values in (self.mean, self.std))
            table = (table - means) / deviations
        return table
