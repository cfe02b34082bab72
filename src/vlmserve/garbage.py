"""Limits Python's cyclic garbage collector in a server to objects of requests."""

from __future__ import annotations

import gc

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
