"""The slots of a running request's state."""

from __future__ import annotations

from bisect import bisect_right

from vlmserve.layer_specs import CHUNK, NO_SLOT
from vlmserve.steps import StateStep


class StateSlots:
    """Slots of a request's state, and of the checkpoints that its next steps leave."""

    __slots__ = (
        "cuts",
        "held",
        "kept",
        "keys",
        "known_to_runner",
        "leaving",
        "planned",
        "reached",
        "slot",
        "source",
        "unsent",
    )

    def __init__(self, slot: int, source: int, num_tokens: int) -> None:
        """num_tokens: of the state in `source`."""
        self.slot = slot
        """Working slot."""
        self.source = source
        """Slot of the state after the tokens of all planned steps, or `NO_SLOT`."""
        self.held = NO_SLOT
        """Checkpoint that its first step reads."""
        self.reached = num_tokens
        """Tokens of all planned steps."""
        self.cuts: list[int] = []
        """Numbers of tokens, in order, where chunks may end and kernels divide their rows."""
        self.leaving: dict[int, bytes] = {}
        """Keys of the checkpoints that it is going to leave, by their numbers of tokens."""
        self.kept: set[int] = set()
        """Numbers of tokens of checkpoints that a later request probably finds useful. The others are spare."""
        self.unsent: list[tuple[int, int]] = []
        """`StateStep.checkpoints` of the next message."""
        self.planned: list[tuple[int, int]] = []
        """Checkpoints of planned steps: numbers of tokens and slots."""
        self.keys: list[bytes] = []
        """Checkpoints that it has read or left."""
        self.known_to_runner = False

    def message(self, reached: int) -> StateStep | None:
        """Return what a step up to that many tokens does. None: its state goes on in its working slot."""
        self.reached = reached
        if self.known_to_runner and self.source == self.slot and not self.unsent:
            return None
        step = StateStep(self.slot, self.source, tuple(self.unsent))
        self.source, self.unsent, self.known_to_runner = self.slot, [], True
        return step

    def last_cut(self, end: int) -> int:
        """Return the last place, at most `end`, where a chunk may end."""
        place = bisect_right(self.cuts, end)
        return max([end // CHUNK * CHUNK, *self.cuts[max(0, place - 1) : place]])

    def next_cut(self, start: int) -> int:
        """Return the first place after `start` where a chunk may end."""
        place = bisect_right(self.cuts, start)
        return min([start // CHUNK * CHUNK + CHUNK, *self.cuts[place : place + 1]])

    def cuts_between(self, start: int, end: int) -> list[int]:
        """Return the cuts ``start < cut <= end``."""
        return self.cuts[bisect_right(self.cuts, start) : bisect_right(self.cuts, end)]
