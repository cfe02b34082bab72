"""Keeps the cyclic garbage collector away from long-lived objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG_OBJECTS = 10_000
"""Objects between young collections: more than a few hundred concurrent requests have, so most are freed before."""


def freeze_loaded_objects() -> None:
    """Exclude all current objects from collections: scanning hundreds of thousands takes long."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause collections during imports, which create lasting objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
