"""Adapters loaded and unloaded while a cluster runs.

Merged in any order, workers' reports give each adapter's latest change (a last-writer-wins map, Shapiro et al. 2011),
so gateways need no store and do not talk to each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

MAX_UNLOADED = 1000
"""Unloaded adapters to remember; the oldest are forgotten first."""


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    time: int
    """Nanoseconds since 1970; later than every change that its gateway knew."""
    gateway: str
    """The gateway's id; it orders changes of the same time."""
    name: str
    path: str | None = None
    """The adapter's folder, as each worker finds it in its --lora-folder; None: unloaded."""
    mixture: str = ""
    """The X-LoRA checkpoint that mixes the adapter; empty: served by itself."""

    @property
    def adapter(self) -> str:
        return self.mixture or self.name

    @property
    def part(self) -> str | None:
        """The adapter within its X-LoRA mixture; None: it stands alone."""
        return self.name if self.mixture else None

    @property
    def order(self) -> tuple[int, str]:
        return self.time, self.gateway


class Changes:
    """The latest change of each adapter, and of each part of an X-LoRA mixture since the mixture was last loaded."""

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
        parts = self._latest.get(change.adapter, {})
        return all(
            before.order < change.order for part in (None, change.part) if (before := parts.get(part)) is not None
        )

    def add(self, change: Change) -> None:
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
        """Changes that are news to `others`, oldest first."""
        return [change for change in self if others.is_news(change)]

    def time_after(self, now: int) -> int:
        """The time of a new change: now, but later than every known change."""
        return max(now, *(change.time + 1 for change in self)) if self._latest else now

    @property
    def loaded(self) -> frozenset[str]:
        return frozenset(
            name for name, parts in self._latest.items() if (whole := parts.get(None)) is None or whole.path is not None
        )

    @property
    def unloaded(self) -> frozenset[str]:
        return frozenset(name for name, parts in self._latest.items() if None in parts and parts[None].path is None)

    def _forget(self) -> None:
        unloaded = [parts[None] for parts in self._latest.values() if None in parts and parts[None].path is None]
        for change in sorted(unloaded, key=lambda change: change.order)[: -MAX_UNLOADED or None]:
            del self._latest[change.adapter]
