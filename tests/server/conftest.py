from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.mock_checkpoint import make_mock_checkpoint
from tests.server.live import LiveServer


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return make_mock_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def temporary(monkeypatch):
    """A folder for what servers keep while they run, with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        monkeypatch.setenv("TMPDIR", path)
        yield Path(path)


@pytest.fixture(scope="module")
def live(folder):
    """A fast server, shared by the tests of a module."""
    with LiveServer(folder, server={"max_body_bytes": 200_000}, media={"max_images": 2}) as server:
        yield server


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    """A server with a random model, which by itself would write garbage."""
    from tests.checkpoints import make_llama  # torch, which few of these tests need

    folder = make_llama(tmp_path_factory.mktemp("llama"), max_position_embeddings=2048)
    engine = {"engine": "real", "dtype": "float32", "device": "cpu", "kv_cache_memory": "8MiB", "num_threads": 1}
    engine["speculation"] = "off"  # drafts move the last digits of logprobs
    with LiveServer(folder, engine=engine) as server:
        yield server


@pytest.fixture(scope="module")
def slow(folder):
    """A server whose answers take long: 20 ms a token."""
    with LiveServer(folder, engine={"mock_tpot": 0.02}, server={"shutdown_grace": 0.2}) as server:
        yield server


@pytest.fixture(scope="module")
def live_waiting(folder):
    """A server whose first tokens never come in time."""
    with LiveServer(folder, engine={"mock_ttft": 60}) as server:
        yield server


@pytest.fixture(scope="module", params=["sqlite"])
def keeping(request, folder, tmp_path_factory):
    """A fast server that keeps a history, shared by the tests of a module; see `IN_BOTH_KINDS`."""
    path = tmp_path_factory.mktemp("history") / "history.db"
    url = f"sqlite:///{path}" if request.param == "sqlite" else request.getfixturevalue("postgres").new_database()
    server = {"storage_url": url, "max_file_bytes": 100_000, "max_stored_bytes": 1_000_000}
    with LiveServer(folder, server=server, media={"max_images": 2}) as running:
        yield running
