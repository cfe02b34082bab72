"""The slots of a running request's states."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from vlmserve.layer_specs import CHUNK, NO_SLOT
from vlmserve.steps import StateStep


class StateSlots:
    """Slots of a request's states, one in each pass of the model, and of the checkpoints that its next steps leave."""

    __slots__ = (
        "cuts",
        "held",
        "kept",
        "keys",
        "known_to_runner",
        "leaving",
        "planned",
        "reached",
        "slots",
        "sources",
        "unsent",
    )

    def __init__(self, slots: Sequence[int], sources: Sequence[int], num_tokens: int) -> None:
        """num_tokens: of the states in `sources`."""
        self.slots = [*slots]
        """Working slots. None: children have taken them over."""
        self.sources = [*sources]
        """Slots of the states after the tokens of all planned steps. None: such states are in no slot."""
        self.held: list[int] = []
        """Checkpoints that its first step reads."""
        self.reached = num_tokens
        """Tokens of all planned steps."""
        self.cuts: list[int] = []
        """Numbers of tokens, in order, where chunks may end and kernels divide their rows."""
        self.leaving: dict[int, bytes] = {}
        """Keys of the checkpoints that it is going to leave, by their numbers of tokens."""
        self.kept: set[int] = set()
        """Numbers of tokens of checkpoints that a later request probably finds useful. The others are spare."""
        self.unsent: list[tuple[int, Sequence[int]]] = []
        """Checkpoints of the next message: numbers of tokens and slots."""
        self.planned: list[tuple[int, Sequence[int]]] = []
        """Checkpoints of planned steps: numbers of tokens and slots."""
        self.keys: list[bytes] = []
        """Checkpoints that it has read or left."""
        self.known_to_runner = False

    def message(self, reached: int) -> tuple[StateStep, ...] | None:
        """Return what a step up to that many tokens does. None: states go on in their working slots."""
        self.reached = reached
        if self.known_to_runner and self.sources == self.slots and not self.unsent:
            return None
        sources = self.sources or [NO_SLOT] * len(self.slots)
        steps = [
            StateStep(slot, source, tuple((num_tokens, slots[number]) for num_tokens, slots in self.unsent))
            for number, (slot, source) in enumerate(zip(self.slots, sources, strict=True))
        ]
        self.sources, self.unsent, self.known_to_runner = self.slots[:], [], True
        return tuple(steps)

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
