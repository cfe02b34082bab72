"""What the garbage collector still scans in a server."""

from __future__ import annotations

import gc
import weakref

import pytest

from vlmserve.garbage import freeze_loaded_objects


class Node:
    def __init__(self) -> None:
        self.self = self


@pytest.fixture(autouse=True)
def collector():
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def test_what_is_loaded_is_spared_and_later_cycles_are_still_found():
    garbage, loaded = weakref.ref(Node()), [Node()]
    freeze_loaded_objects()
    assert garbage() is None
    assert not any(known is loaded for known in gc.get_objects())
    later = weakref.ref(Node())
    assert later() is not None
    for _ in range(2 * gc.get_threshold()[0]):
        loaded.append(Node())
    loaded.clear()
    kept = [Node() for _ in range(2 * gc.get_threshold()[0])]
    assert kept
    assert later() is None
