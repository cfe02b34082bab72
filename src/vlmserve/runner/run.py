from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from vlmserve.kernels.torch_sampling import DrawLater
from vlmserve.runner.batch import Batch
from vlmserve.runner.requests import ScheduledRequest


class Run(NamedTuple):
    """The results of a step before sampling."""

    batch: Batch
    rows: Tensor | None
    """Rows of `hidden`; None: all."""
    embeddings: Tensor
    hidden: Tensor
    """Final hidden states."""
    of_heads: Tensor | None
    logits: Tensor
    later: DrawLater | None
    """Samples asynchronously, one token for each of `sampled`."""
    sampled: list[ScheduledRequest]
    scalings: dict[str, list[float]]
