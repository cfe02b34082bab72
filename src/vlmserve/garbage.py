"""Keeps Python's cyclic garbage collector away from objects that live as long as the process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG_OBJECTS = 10_000
"""More objects than a few hundred requests have at the same time, so that most are freed before a collection."""


def freeze_loaded_objects() -> None:
    """Call once all is loaded: what lives now, modules, models and tokenizers, is never scanned again.

    A full collection goes through every container that is alive. Hundreds of thousands of them are from imports, and
    the more objects come and go with requests, the more often they would be gone through.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no garbage during imports: collections would scan hundreds of thousands of new objects that all stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
