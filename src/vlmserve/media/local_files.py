"""Images and videos from ``file://`` URLs: out of one folder that the operator names, and from nowhere else."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from vlmserve.config import MediaConfig
from vlmserve.errors import ImageFetchError
from vlmserve.folders import expanded
from vlmserve.media.kinds import check_num_bytes, max_bytes
from vlmserve.types import MediaKind


def read_allowed_file(url: str, limits: MediaConfig, kind: MediaKind = "image") -> bytes:
    """The file at a ``file://`` URL.

    Raises ImageFetchError unless it is a file in `limits.allowed_media_path`, wherever symbolic links lead;
    ImageTooLargeError, or that of another kind, if it is too large. What is outside is refused before anybody looks
    whether it exists. Who can write into the folder can also read by way of it, and is trusted.
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
        # The path has no links, so one that is there now was put there since; and a pipe must not be waited for.
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
