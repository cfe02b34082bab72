"""Folders for the user's files, and vlmserve's own. Users in containers may lack a home."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import MutableMapping
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent


def expanded(path: str | os.PathLike[str]) -> Path:
    """Expand ``~``; keep it without a home, where `Path.expanduser` raises."""
    return Path(os.path.expanduser(path))


def data_folder() -> Path | None:
    """In ``XDG_DATA_HOME`` or ``~/.local/share``; None without a home."""
    return _own_folder("XDG_DATA_HOME", "~/.local/share")


def cache_folder() -> Path:
    """In ``XDG_CACHE_HOME`` or ``~/.cache``; temporary without a home."""
    return _own_folder("XDG_CACHE_HOME", "~/.cache") or temporary_folder()


def name_hub_folder(environ: MutableMapping[str, str]) -> None:
    """Without a home, give Hugging Face's cache a temporary folder."""
    if os.path.expanduser("~") == "~" and not environ.keys() & {"HF_HOME", "XDG_CACHE_HOME"}:
        environ["HF_HOME"] = str(cache_folder() / "huggingface")


def _own_folder(variable: str, default: str) -> Path | None:
    place = os.path.expanduser(os.environ.get(variable) or default)
    return None if place.startswith("~") else Path(place) / "vlmserve"


@cache
def code_digest(names: tuple[str, ...], package: Path = PACKAGE) -> str:
    """Digest modules and folders of vlmserve's code."""
    from blake3 import blake3

    digest = blake3()
    for name in names:
        for path in [package / name] if name.endswith(".py") else sorted((package / name).rglob("*.py")):
            contents = path.read_bytes()
            digest.update(f"{path.relative_to(package)} {len(contents)}\n".encode() + contents)
    return digest.hexdigest()


@cache
def temporary_folder() -> Path:
    """Common to the user's processes, unless another user has its name."""
    folder = Path(tempfile.gettempdir()) / f"vlmserve-{os.geteuid()}"
    with contextlib.suppress(OSError):  # the name belongs to a file or broken link
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
            return folder
    return Path(tempfile.mkdtemp(prefix="vlmserve-"))
