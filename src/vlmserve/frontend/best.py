"""Compares several answers to one prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vlmserve.types import TokenLogprobs


def mean_logprob(logprobs: Sequence[TokenLogprobs]) -> float:
    """Mean of an answer's logprobs, minus infinity without tokens. The best of several answers has the highest."""
    return sum(token.logprob for token in logprobs) / len(logprobs) if logprobs else -math.inf
