"""Files of the disk cache: what is read back, what is a miss, and what is removed."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from vlmserve.cache import tiers
from vlmserve.cache.fetches import Fetches, Plan
from vlmserve.cache.tiers import DiskTier, Entries
from vlmserve.steps import Bytes

KEY, OTHER = b"k" * 32, b"o" * 32
SIZE = 5000


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    entries = Entries(tmp_path / "disk", 2**20)
    assert entries.is_usable()
    return DiskTier(entries, b"model")


def content(seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8)


def store(tier: DiskTier, *keys: bytes) -> None:
    for seed, key in enumerate(keys):
        tier.store(key, SIZE, lambda seed=seed: content(seed))
        tier.flush()


def test_entries_are_found_by_key_and_model(tier: DiskTier) -> None:
    store(tier, KEY, OTHER)
    found = tier.read(OTHER, SIZE)
    assert found is not None
    assert found.tobytes() == content(1).tobytes()
    assert tier.has(KEY)
    assert DiskTier(tier.entries, b"another model").read(KEY, SIZE) is None
    assert tier.read(b"n" * 32, SIZE) is None
    assert tier.stats().disk_hits == 1
    assert tier.stats().disk_misses == 1


def test_files_are_private(tier: DiskTier) -> None:
    store(tier, KEY)
    assert stat.S_IMODE(tier.path(KEY).stat().st_mode) == 0o600
    assert stat.S_IMODE(tier.entries.folder.stat().st_mode) == 0o700


def test_folders_of_everybody_are_not_used(tier: DiskTier, caplog: pytest.LogCaptureFixture) -> None:
    tier.entries.folder.chmod(0o777)
    assert not tier.entries.is_usable()
    assert "every user can write" in caplog.text


def change(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


BREAKS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut": lambda data: data[:-1],
    "cut in the header": lambda data: data[:20],
    "longer": lambda data: data + b"\0",
    "content": lambda data: change(data, 1000),
    "checksum": lambda data: change(data, 20),
    "length": lambda data: change(data, 8),
    "magic number": lambda data: change(data, 0),
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("name", BREAKS)
def test_broken_files_are_misses_and_removed(tier: DiskTier, name: str) -> None:
    store(tier, KEY)
    path = tier.path(KEY)
    path.write_bytes(BREAKS[name](path.read_bytes()))
    assert tier.read(KEY, SIZE) is None
    assert tier.stats().disk_broken == 1
    assert not path.exists()
    store(tier, KEY)
    assert tier.read(KEY, SIZE) is not None


@pytest.mark.parametrize("kind", ["renamed", "link", "folder", "pipe", "of everybody"])
def test_foreign_files_are_misses(tier: DiskTier, kind: str) -> None:
    store(tier, OTHER)
    path = tier.path(KEY)
    if kind == "renamed":
        tier.path(OTHER).rename(path)
    elif kind == "link":
        path.symlink_to(tier.path(OTHER))
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        tier.path(OTHER).chmod(0o602)
    assert tier.read(OTHER if kind == "of everybody" else KEY, SIZE) is None


def test_files_that_cannot_be_read_stay(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    store(tier, KEY)

    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", fail)
        assert tier.read(KEY, SIZE) is None
    assert tier.read(KEY, SIZE) is not None


def test_known_entries_need_no_write_access(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    store(tier, KEY)

    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, "read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(os, "utime", fail)
        store(tier, KEY)
    assert tier.read(KEY, SIZE) is not None
    store(tier, OTHER)
    assert tier.has(OTHER)


def test_entries_of_another_size_are_misses(tier: DiskTier) -> None:
    store(tier, KEY)
    assert tier.read(KEY, SIZE - 1) is None


def test_least_recently_used_files_are_evicted(tmp_path: Path) -> None:
    tier = DiskTier(Entries(tmp_path, 5 * 8192), b"model")
    keys = [bytes([number]) * 32 for number in range(5)]
    for second, key in enumerate(keys):
        store(tier, key)
        os.utime(tier.path(key), (second, second))
    assert tier.read(keys[0], SIZE) is not None  # it is used again
    store(tier, KEY)
    assert [tier.has(key) for key in (*keys, KEY)] == [True, False, False, True, True, True]
    assert tier.stats().disk_evictions == 2
    assert tier.stats().disk_used_bytes <= tier.entries.limit


def test_full_disk_ends_writing_with_one_line(tier: DiskTier, caplog: pytest.LogCaptureFixture) -> None:
    store(tier, KEY)
    shutil.rmtree(tier.entries.folder)
    tier.entries.folder.write_text("")  # no file can be written there
    caplog.set_level(logging.WARNING)
    store(tier, OTHER, KEY)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "keeps nothing more" in caplog.text
    assert tier.stats().disk_written == 1


def test_nothing_is_kept_while_much_waits(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "MAX_QUEUED", SIZE - 1)
    store(tier, KEY)
    assert not tier.has(KEY)
    assert tier.stats().disk_dropped == 1


def test_forgotten_entries_are_removed_once_written(tier: DiskTier) -> None:
    tier.store(KEY, SIZE, content)
    tier.forget([KEY, OTHER])
    tier.flush()
    assert not tier.has(KEY)


def test_files_of_killed_writers_are_removed(tier: DiskTier) -> None:
    old, new = (tier.path(KEY).with_suffix(f".{name}.writing") for name in ("00000000", "11111111"))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    foreign = tier.entries.folder / "notes.txt"
    foreign.write_text("mine")
    store(tier, KEY)
    assert (old.exists(), new.exists(), foreign.exists()) == (False, True, True)
    assert tier.entries.clear() > SIZE
    assert [*tier.entries.folder.iterdir()] == [foreign]


def test_contents_stay_until_all_holders_leave(tier: DiskTier) -> None:
    store(tier, KEY)
    fetches = Fetches(tier)
    for owner in ("a", "b"):
        fetches.begin(owner, Plan(lambda read: assert_read(read([KEY], SIZE), read([OTHER], SIZE))))
        assert fetches.wait(60)
        assert fetches.is_done(owner)
    assert not fetches.wait(60), "nothing is being read"
    fetches.release("a")
    assert [*fetches.contents] == [KEY]
    fetches.release("b")
    assert not fetches.contents


def assert_read(found: int, missing: int) -> None:
    assert (found, missing) == (1, 0)
