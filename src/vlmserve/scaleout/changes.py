"""Which adapters were loaded and unloaded while a cluster runs.

Every worker says which changes it has made. Whoever puts what all of them say together, in any order, gets the same: of
each adapter the latest change (a last-writer-wins map, Shapiro et al. 2011). So nothing else has to store them, and
several gateways need not talk to each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

MAX_UNLOADED = 1000
"""Adapters of which it is remembered that they were unloaded; those that were first are forgotten first."""


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """An adapter was loaded or unloaded.

    time: nanoseconds since 1970, and later than every change that its gateway knew. gateway: its id; of two changes at
    one time, that of the greater one counts as later. path: of the adapter's folder, as each worker finds it in its
    --lora-folder; None: it was unloaded. mixture: the X-LoRA checkpoint that mixes it; empty: it is served by itself.
    """

    time: int
    gateway: str
    name: str
    path: str | None = None
    mixture: str = ""

    @property
    def adapter(self) -> str:
        return self.mixture or self.name

    @property
    def part(self) -> str | None:
        """Which of the adapters that X-LoRA mixes; None: the whole of what is served."""
        return self.name if self.mixture else None

    @property
    def order(self) -> tuple[int, str]:
        return self.time, self.gateway


class Changes:
    """The latest change of each adapter, and of each that X-LoRA mixes since its checkpoint was loaded last."""

    def __init__(self, changes: Iterable[Change] = ()) -> None:
        self._latest: dict[str, dict[str | None, Change]] = {}
        self._ordered: list[Change] | None = None
        for change in changes:
            self.add(change)

    def __iter__(self) -> Iterator[Change]:
        if self._ordered is None:
            every = (change for parts in self._latest.values() for change in parts.values())
            self._ordered = sorted(every, key=lambda change: change.order)
        return iter(self._ordered)

    def is_news(self, change: Change) -> bool:
        """Whether neither it nor a later one that undoes it is there."""
        parts = self._latest.get(change.adapter, {})
        return all(
            before.order < change.order for part in (None, change.part) if (before := parts.get(part)) is not None
        )

    def add(self, change: Change) -> None:
        """Take a change in, unless there is a later one."""
        if not self.is_news(change):
            return
        self._ordered = None
        parts = self._latest.setdefault(change.adapter, {})
        parts[change.part] = change
        if change.part is None:
            for part in [part for part, before in parts.items() if before.order < change.order]:
                del parts[part]
            self._forget()

    def missing_in(self, others: Changes) -> Sequence[Change]:
        """Those that are not among others, from the first to the last."""
        return [change for change in self if others.is_news(change)]

    def time_after(self, now: int) -> int:
        """The time of a new change: now, or later than every change that is there."""
        return max(now, *(change.time + 1 for change in self)) if self._latest else now

    @property
    def loaded(self) -> frozenset[str]:
        """Adapters that were loaded, or of which others are mixed."""
        return frozenset(
            name for name, parts in self._latest.items() if (whole := parts.get(None)) is None or whole.path is not None
        )

    def _forget(self) -> None:
        unloaded = [parts[None] for parts in self._latest.values() if None in parts and parts[None].path is None]
        for change in sorted(unloaded, key=lambda change: change.order)[: -MAX_UNLOADED or None]:
            del self._latest[change.adapter]
