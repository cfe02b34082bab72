"""Processes that are forked from one with vlmserve's libraries."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import msgspec
import psutil
import pytest

from tests.mock_checkpoint import make_mock_checkpoint
from tests.waiting import wait_until
from vlmserve.engine.preload import ForkedProcess, Preloader, fork_children_from
from vlmserve.errors import ModelLoadError
from vlmserve.scaleout.launch import MODULE, MemberProcess
from vlmserve.scaleout.member_messages import GatewayLaunch, WorkerLaunch
from vlmserve.settings.config import EngineConfig, MediaConfig, ServerConfig

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture(scope="module")
def preloader() -> Iterator[Preloader]:
    made = Preloader()
    fork_children_from(made.address)
    yield made
    fork_children_from("")
    made.close()


def launch_of(model: object) -> WorkerLaunch:
    engine = EngineConfig(model=str(model), engine="mock")
    server = ServerConfig(port=0, storage_url="none", max_restarts=0)
    sections = (engine.model_dump_json(), MediaConfig().model_dump_json(), server.model_dump_json())
    return WorkerLaunch("one", "token", *sections)


def test_forked_worker_serves_and_ends(preloader, tmp_path):
    worker = MemberProcess(launch_of(make_mock_checkpoint(tmp_path)))
    assert worker.wait_until_up().startswith("http://127.0.0.1:")
    family = psutil.Process(preloader.pid).children()
    assert len(family) == 2, "its engine is forked as well"
    worker.terminate()
    assert worker.wait(60) == 0
    wait_until(lambda: not any(one.is_running() for one in family))
    worker.close()


def test_forked_worker_tells_its_error(preloader, tmp_path):
    worker = MemberProcess(launch_of(tmp_path / "nothing"))
    with pytest.raises(ModelLoadError, match="nothing"):
        worker.wait_until_up()
    assert worker.wait(60) == 1
    worker.close()


def test_killed_fork_reports_its_signal(preloader):
    process = ForkedProcess(preloader.address, MODULE)
    assert process.poll() is None
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    process.stdin.close()


def test_fork_ends_with_its_owner(preloader):
    process = ForkedProcess(preloader.address, MODULE)
    launch = GatewayLaunch("token", ServerConfig(port=0).model_dump_json(), "{}")
    process.stdin.write(msgspec.json.encode(launch) + b"\n")
    process.stdin.flush()
    assert process.stdout is not None
    assert b"http://" in process.stdout.readline()
    process.stdin.close()
    assert process.wait(60) == 0


def test_forks_without_their_preloader_count_as_killed(tmp_path):
    preloader = Preloader()
    process = ForkedProcess(preloader.address, MODULE)
    preloader.close()
    assert process.wait(60) == -signal.SIGKILL
    wait_until(lambda: not psutil.pid_exists(process.pid))
    with pytest.raises(FileNotFoundError):
        ForkedProcess(preloader.address, MODULE)
