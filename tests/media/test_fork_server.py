"""The process that forks others, when it answers late."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.rendering import fork_servers
from tests.waiting import wait_until
from vlmserve.errors import UnavailableError
from vlmserve.media import fork_server
from vlmserve.media.fork_server import ForkServer
from vlmserve.models.hub import resolve_model
from vlmserve.sampling.trials import GrammarTrials
from vlmserve.settings.config import EngineConfig
from vlmserve.types import Grammar

_LATE = """
import os, time
os.read(0, 65536)
while os.read(0, 64):
    time.sleep(0.4)
    os.write(0, b"12345\\n")
"""


def test_late_answer_is_never_read_as_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "COMMAND", [sys.executable, "-c", _LATE])
    monkeypatch.setattr(fork_server, "TIMEOUT", 0.1)
    server = ForkServer("pdf")
    try:
        time.sleep(0.3)  # it has read its settings
        assert server.end(1) == -9
        time.sleep(0.5)  # the answer is there by now
        reading, writing = os.pipe()
        with pytest.raises(OSError, match="descriptor"):
            server.fork(reading, writing)
        os.close(reading)
        os.close(writing)
    finally:
        server.close()


def test_starting_server_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, ended = tmp_path / "began", tmp_path / "ended"
    script = "import pathlib, sys, time; began, ended = map(pathlib.Path, sys.argv[1:]); began.touch(); time.sleep(1)"
    monkeypatch.setattr(fork_server, "COMMAND", [sys.executable, "-c", f"{script}; ended.touch()", began, ended])
    server = ForkServer("pdf")
    wait_until(began.exists)
    server.close()
    assert not ended.exists()


def test_last_owner_ends_a_server_without_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Engines of other tests may still own a server for the model's own folder.
    folder = Path(shutil.copytree(resolve_model("pixie"), tmp_path / "pixie"))
    fork_server.end_servers()
    first, second = GrammarTrials(folder, EngineConfig()), [GrammarTrials(folder, EngineConfig())]
    first.check(Grammar.json('{"type": "integer"}'))
    servers = fork_servers()
    assert len(servers) == 1
    del first
    second[0].check(Grammar.json('{"type": "boolean"}'))
    assert fork_servers() == servers

    class Collecting(ForkServer):
        def __init__(self, *args: Any) -> None:
            second.clear()  # as where a collection begins while a server starts
            super().__init__(*args)

    monkeypatch.setattr(fork_server, "ForkServer", Collecting)
    other = GrammarTrials(Path(shutil.copytree(folder, tmp_path / "other")), EngineConfig())
    other.check(Grammar.json('{"type": "null"}'))
    assert second == []
    assert len(fork_servers()) == 2
    fork_server.end_disowned()  # as before the next process is forked
    [server] = fork_servers()
    assert server not in servers
    del other
    fork_server.end_disowned()


@pytest.mark.parametrize("call", ["socket.socketpair", "subprocess.Popen"])
def test_server_that_cannot_start_is_unavailable(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(call, fail)
    with pytest.raises(UnavailableError, match="Too many open files"):
        ForkServer("image")
