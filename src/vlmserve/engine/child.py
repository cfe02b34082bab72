"""Code of the engine and rank processes."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

_MAX_SOCKET_PATH = 100
"""Maximum length of a Unix socket's path on any system."""
_LARGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Lets torch allocate 2 MiB pages. Touching small pages took a fifth of the time to load a 2 GB model."""
_PRODUCT_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "256"}
"""Bounds the kernel caches of oneDNN and torch. oneDNN generates code for each row count of each weight. The default of
1,024 entries uses 700 MB after thousands of requests, this 200 MB, at the same speed."""


def exit_with_parent(directory: Path | None = None) -> None:
    """Wait until the parent closes standard input, remove `directory`, and exit immediately."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


def socket_directory() -> Path:
    """Keep the path short enough for sockets."""
    directory = Path(tempfile.mkdtemp(prefix="vlmserve-"))
    if len(str(directory)) > _MAX_SOCKET_PATH - len("/engine-beat"):
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix="vlmserve-", dir="/tmp"))
    return directory


def child_environment() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    environment = {**_LARGE_PAGES, **_PRODUCT_CACHES, **os.environ}
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        paths = [root, environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environment
