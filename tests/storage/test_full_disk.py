"""A full disk: nothing more is kept, and what is deleted makes space."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from vlmserve.errors import StorageError
from vlmserve.storage.database import Database
from vlmserve.storage.files import Files
from vlmserve.storage.items import Page

MB = 1024**2


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk, where tests may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> None:
    with contextlib.suppress(OSError), open(folder / "somebody-elses", "ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@pytest.mark.parametrize("size", [MB // 4, 6 * MB])
def test_deleting_files_frees_a_full_disk(disk: Path, size: int) -> None:
    database = Database(f"sqlite:///{disk / 'history.db'}", 2)
    files = Files(database, time.time, 100 * MB)

    def create(number: int) -> None:
        files.create("", f"file-{number}", os.urandom(size), "a.png", "vision", "image/png", None)

    number = 0
    with contextlib.suppress(StorageError):
        while True:
            create(number)
            number += 1
    fill(disk)
    for gone in range(number):
        files.delete("", f"file-{gone}")
    database.shrink()
    assert number >= 2
    assert (disk / "history.db").stat().st_size < MB
    assert files.list("", Page(None, 10, True), None) == ([], False)
    create(1001)
    with database.read() as connection:
        assert connection.execute(text("PRAGMA integrity_check")).scalar_one() == "ok"
        assert connection.execute(text("PRAGMA secure_delete")).scalar_one() == 1
    database.close()
