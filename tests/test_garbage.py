"""Objects that the garbage collector of a server scans."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import gc, weakref
from vlmserve.garbage import freeze_loaded_objects

class Node:
    def __init__(self):
        self.self = self

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
assert later() is None
"""


def test_loaded_objects_are_spared_and_later_cycles_found() -> None:
    """In a process without other threads, whose collections would free cycles earlier or make this one skip."""
    subprocess.run([sys.executable, "-c", _PROGRAM], check=True, timeout=120)
