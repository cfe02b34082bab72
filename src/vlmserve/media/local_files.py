"""Read images and videos from ``file://`` URLs in one folder that the operator allows."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from vlmserve.errors import ImageFetchError
from vlmserve.folders import expanded
from vlmserve.media.kinds import check_num_bytes, max_bytes
from vlmserve.settings.config import MediaConfig
from vlmserve.types import MediaKind


def read_allowed_file(url: str, limits: MediaConfig, kind: MediaKind = "image") -> bytes:
    """Raises ImageFetchError unless the file is in `limits.allowed_media_path` after following links, and the kind's
    size error.

    Errors do not reveal whether other paths exist. Everyone who can write into the folder is trusted: links let them
    read other files.
    """
    if limits.allowed_media_path is None:
        raise ImageFetchError(
            "file:// URLs are not allowed here; send a data: URL, or let the operator allow a folder with "
            "--allowed-media-path"
        )
    try:
        parts = urlsplit(url)
        named = Path(unquote(parts.path, errors="strict"))
    except ValueError as error:
        raise ImageFetchError(f"the {kind}'s URL is malformed: {error}") from None
    if parts.netloc not in ("", "localhost") or not named.is_absolute() or parts.query or parts.fragment:
        raise ImageFetchError(f"the {kind}'s URL is malformed; write file:///folder/name")
    root = expanded(limits.allowed_media_path).resolve()
    try:
        path = named.resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of links, or a null byte
        raise ImageFetchError(f"the {kind}'s file does not exist") from None
    if not path.is_relative_to(root):
        raise ImageFetchError(f"the {kind} is not in the folder that --allowed-media-path allows")
    return _read(path, limits, kind)


def _read(path: Path, limits: MediaConfig, kind: MediaKind) -> bytes:
    try:
        # The path was resolved, so a link is new. O_NONBLOCK: do not wait for a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ImageFetchError(f"the {kind}'s file cannot be read: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ImageFetchError(f"the {kind}'s URL does not name a file")
        check_num_bytes(status.st_size, limits, kind)
        most = max_bytes(limits, kind)
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(most + 1)  # it may have grown
    finally:
        os.close(descriptor)
    check_num_bytes(len(data), limits, kind)
    return data
