"""Decides which requests run through the model's own layer for multi-token prediction (MTP)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from vlmserve.scheduler.drafts.curve import Curve

_FIRST_STEPS, _MOST_STEPS = 2.0, 8.0
"""Initial and maximum balance of `Layer`, in steps of one row."""
_TRIAL = 48
"""Rows of an answer that a trial should at least be able to run."""
_CONTEXT = 24
"""Rows that the layer reads before its first draft, if it did not read the prompt."""
_PATIENCE = 64
"""Steps without the layer's drafts after which one is made to see if it is right."""
_MOST_TRIED = 8
"""Drafts that are made one after the other because each was right."""
_MOST_WORTH = 128
"""Tokens of an answer whose drafts pay for the rows of its prompt."""


class LayerCosts(NamedTuple):
    draft: float
    """Seconds that a draft takes."""
    rows: Curve
    """Seconds that rows of a step take."""
    has_context: bool = False
    """The layer reads the model's own keys and values."""


@dataclass(slots=True)
class LayerUse:
    """A request's use of the layer."""

    runs: bool = False
    num_rows: int = 0
    """Rows since it last began to run. A prompt counts as `_CONTEXT` at least."""
    num_undrafted: int = 0
    """Steps since the layer made a draft."""
    num_tried: int = 0
    was_right: bool = False
    """The last draft was right, and none was made since."""

    def begin(self, *, has_context: bool) -> None:
        self.runs, self.num_rows, self.num_tried = True, _CONTEXT if has_context else 0, 0

    def count(self, wanted: int, *, may_draft: bool) -> int:
        """Return the number of drafts: the wanted one, or 1 now and then to see if it is right."""
        self.num_undrafted += 1
        if not self.runs or self.num_rows < _CONTEXT or not may_draft:
            return 0
        if not wanted and self.num_undrafted > _PATIENCE:
            wanted, self.num_tried = 1, 0
        elif not wanted and self.was_right and self.num_tried < _MOST_TRIED:
            wanted, self.num_tried = 1, self.num_tried + 1
        if wanted:
            self.num_undrafted, self.was_right = 0, False
        return wanted


class Layer:
    """Seconds that rows of the layer may cost which its drafts do not save again: a share of all steps.

    A request's keys and values in the layer have to be complete, so the layer runs for each of its tokens, or stops. If
    it begins again, its context begins there.
    """

    def __init__(self, costs: LayerCosts, step: float) -> None:
        """step: seconds of a step of one row."""
        self.costs = costs
        self._most = _MOST_STEPS * step
        self._left = _FIRST_STEPS * step

    def add(self, seconds: float) -> None:
        self._left = min(self._left + seconds, self._most)

    def affords(self, use: LayerUse, rows_left: int, cost: float) -> bool:
        """Return whether to run rows that drafts do not pay for.

        rows_left: rows of the request before the next sampled token. cost: of a row.
        """
        return self._left > (0.0 if use.runs else min((rows_left + _TRIAL) * cost, 0.9 * self._most))

    def spend(self, seconds: float) -> None:
        self._left -= seconds


def worth(gain: float, num_tokens: int, rows_left: int, tokens_left: int) -> float:
    """Return the seconds that drafts probably save because the layer runs for `num_tokens` of `rows_left` rows.

    gain: of a step with a decode. tokens_left: that the answer may still have.
    """
    if rows_left == 1:
        return gain
    return gain * min(tokens_left, _MOST_WORTH) * min(1.0, num_tokens / rows_left)
