"""Folders of users, with and without a home."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vlmserve import folders
from vlmserve.errors import AdapterError, CheckpointNotFoundError, InvalidImageError
from vlmserve.settings.config import ServerConfig
from vlmserve.storage.store import open_store


@pytest.fixture
def homeless(monkeypatch, tmp_path):
    """No HOME, no entry in the password database, and an empty folder for temporary files."""

    def unknown(_name: object) -> None:
        raise KeyError("uid not found")

    for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("pwd.getpwuid", "pwd.getpwnam"):
        monkeypatch.setattr(name, unknown)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folders.temporary_folder.cache_clear()
    yield tmp_path
    folders.temporary_folder.cache_clear()


def test_folders_are_those_of_xdg_or_the_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert folders.cache_folder() == Path("/cache/vlmserve")
    assert folders.data_folder() == Path("/home/someone/.local/share/vlmserve")
    assert folders.expanded("~/a") == Path("/home/someone/a")


def test_without_a_home_caches_are_temporary_and_private(homeless):
    folder = folders.cache_folder()
    assert folder == homeless / f"vlmserve-{os.geteuid()}"
    assert folder.stat().st_mode & 0o077 == 0
    environ: dict[str, str] = {}
    folders.name_hub_folder(environ)
    assert environ == {"HF_HOME": str(folder / "huggingface")}


@pytest.mark.parametrize("taken", ["open", "link", "file"])
def test_a_shared_temporary_folder_is_not_used(homeless, taken):
    usual = homeless / f"vlmserve-{os.geteuid()}"
    if taken == "open":
        usual.mkdir()
        usual.chmod(0o777)
    elif taken == "link":
        usual.symlink_to(homeless)
    else:
        usual.touch()
    assert folders.cache_folder() not in (usual, homeless)


def test_without_a_home_nothing_is_kept(homeless, caplog):
    assert open_store(ServerConfig.model_validate({})) is None
    [record] = caplog.records
    assert "are not kept: this user has no home folder: --storage-path names the file" in record.getMessage()


def test_paths_in_unknown_homes_are_not_found(homeless):
    from vlmserve.adapters.location import find_adapter
    from vlmserve.media.sources import check_source
    from vlmserve.models.hub import resolve_model

    for place in ("~/a", "~nobody/a"):
        with pytest.raises(CheckpointNotFoundError):
            resolve_model(place)
        with pytest.raises(AdapterError):
            find_adapter(place)
        with pytest.raises(InvalidImageError, match=f"there is no file {place}"):
            check_source(place)


@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare")
def test_a_user_without_a_home_asks_a_question(tmp_path):
    apart = ["unshare", "-U", "--map-user=54321", "--map-group=54321"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces")
    environ = {name: value for name, value in os.environ.items() if name == "PATH" or name.startswith("LC_")}
    command = [sys.executable, "-m", "vlmserve", "ask", "Hello", "--max-tokens", "2", "--kv-cache-memory", "16MiB"]
    done = subprocess.run(
        [*apart, *command],
        env=environ | {"TMPDIR": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert not (tmp_path / "~").exists()
