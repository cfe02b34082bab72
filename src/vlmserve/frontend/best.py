"""Compares several answers to one prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vlmserve.types import TokenLogprobs


def mean_logprob(logprobs: Sequence[TokenLogprobs]) -> float:
    """Return minus infinity without tokens."""
    return sum(token.logprob for token in logprobs) / len(logprobs) if logprobs else -math.inf
