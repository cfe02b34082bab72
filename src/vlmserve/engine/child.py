"""What the processes of engine and ranks have in common: their environment, their folder, and that they end with their
parent."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

_MAX_SOCKET_PATH = 100
"""Characters of a Unix socket's path that every system allows."""
_LARGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Torch asks for memory in pages of 2 MiB where it needs that much. Touching fresh memory for the first time, page by
page, was a fifth of what loading a model of 2 GB took."""
_PRODUCT_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "256"}
"""Without the native kernels, oneDNN generates code for each number of rows of each weight. It keeps the last 1,024 of
them, as does torch in a cache above it, so that memory grows by 700 MB over thousands of requests; with these it is
200 MB, and products are as fast."""


def exit_with_parent(directory: Path | None = None) -> None:
    """Block until the parent's end of standard input closes, then remove what it left and leave without further ado.

    directory: what it left; None: nothing."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


def socket_directory() -> Path:
    """A new private folder whose path leaves room for the names of sockets."""
    directory = Path(tempfile.mkdtemp(prefix="vlmserve-"))
    if len(str(directory)) > _MAX_SOCKET_PATH - len("/engine-beat"):
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix="vlmserve-", dir="/tmp"))
    return directory


def child_environment() -> dict[str, str]:
    """The child's environment: it must find this very package, wherever the parent has it from, and stay bounded."""
    root = str(Path(__file__).parents[2])
    environment = {**_LARGE_PAGES, **_PRODUCT_CACHES, **os.environ}
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        paths = [root, environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environment
