"""Keeps the cyclic garbage collector away from long-lived objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG_OBJECTS = 10_000
"""Objects between young collections: more than a few hundred concurrent requests have, so most are freed before."""


def freeze_loaded_objects() -> None:
    """Exclude all current objects from collections. Call it after loading modules, models and tokenizers.

    A full collection would scan the hundreds of thousands of objects from imports, the more often the more requests
    come.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause collections during imports, which create hundreds of thousands of lasting objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
