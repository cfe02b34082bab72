"""The state slots of a running request."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from vlmserve.layer_specs import CHUNK, NO_SLOT
from vlmserve.steps import StateStep


class StateSlots:
    """One slot per pass, and slots of the next checkpoints."""

    __slots__ = (
        "accepted",
        "cuts",
        "draft_place",
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
        """Working slots. Empty after children took them over."""
        self.sources = [*sources]
        """Slots of the states after all planned steps. Empty: no slot has such states."""
        self.held: list[int] = []
        """Checkpoints that its first step reads."""
        self.reached = num_tokens
        """Tokens in the states after all planned steps."""
        self.draft_place: int | None = None
        """Place that keeps drafts until the next step. None: it has no drafts."""
        self.accepted = 0
        """Kept drafts that became tokens. The next step puts them into the states."""
        self.cuts: list[int] = []
        """Sorted numbers of tokens where chunks may end and kernels split their rows."""
        self.leaving: dict[int, bytes] = {}
        """Keys of future checkpoints, by number of tokens."""
        self.kept: set[int] = set()
        """Numbers of tokens of checkpoints that later requests probably use. The others are spare."""
        self.unsent: list[tuple[int, Sequence[int]]] = []
        """Checkpoints of the next message: numbers of tokens and slots."""
        self.planned: list[tuple[int, Sequence[int]]] = []
        """Checkpoints of planned steps: numbers of tokens and slots."""
        self.keys: list[bytes] = []
        """Checkpoints that it read or left."""
        self.known_to_runner = False

    def message(self, reached: int) -> tuple[StateStep, ...] | None:
        """None: states stay in their slots, and there are no drafts."""
        self.reached = reached
        if self.known_to_runner and self.sources == self.slots and not self.unsent and self.draft_place is None:
            return None
        sources = self.sources or [NO_SLOT] * len(self.slots)
        drafts = self.draft_place or 0, self.accepted
        self.accepted = 0
        steps = [
            StateStep(slot, source, tuple((num_tokens, slots[number]) for num_tokens, slots in self.unsent), *drafts)
            for number, (slot, source) in enumerate(zip(self.slots, sources, strict=True))
        ]
        self.sources, self.unsent, self.known_to_runner = self.slots[:], [], True
        return tuple(steps)

    def last_cut(self, end: int) -> int:
        place = bisect_right(self.cuts, end)
        return max([end // CHUNK * CHUNK, *self.cuts[max(0, place - 1) : place]])

    def next_cut(self, start: int) -> int:
        place = bisect_right(self.cuts, start)
        return min([start // CHUNK * CHUNK + CHUNK, *self.cuts[place : place + 1]])

    def cuts_between(self, start: int, end: int) -> list[int]:
        return self.cuts[bisect_right(self.cuts, start) : bisect_right(self.cuts, end)]
