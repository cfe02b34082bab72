"""The whole server as a process: starting, signals, and an engine that dies."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest

import vlmserve
from tests.checkpoints import make_llama
from tests.forking import ForkedProcess
from tests.server import program
from tests.server.live import QUESTION, stream_lines
from tests.server.process import engines_of
from tests.waiting import wait_until
from vlmserve.server.run import SIGNAL_ECHO


class ServerProcess:
    """`serve` in a process of its own.

    fresh: in one that has imported nothing, as whoever starts a server has. in_thread: the engine has no process of its
    own. stderr: where the log goes.
    """

    def __init__(
        self,
        engine: dict[str, Any],
        server: dict[str, Any],
        *,
        fresh: bool = False,
        in_thread: bool = False,
        stderr: int = 2,
    ) -> None:
        self.process: ForkedProcess | subprocess.Popen[str]
        if fresh:
            self.process = subprocess.Popen(
                [sys.executable, "-P", program.__file__, json.dumps([engine, server])],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, "PYTHONPATH": str(Path(vlmserve.__file__).parents[1])},
            )
        else:
            self.process = ForkedProcess(program.run, engine, server, in_thread, stderr=stderr)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def wait_until_ready(self) -> str:
        line = self.process.stdout.readline()
        assert line.startswith("vlmserve is ready: http"), line
        self.url = line.split()[3]
        return line

    def engine(self) -> psutil.Process:
        wait_until(lambda: len(engines_of(self.process.pid)) == 1)
        return engines_of(self.process.pid)[0]

    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=60).text

    def health(self) -> httpx.Response:
        return httpx.get(f"{self.url}/health", timeout=60)


@contextlib.contextmanager
def serving(
    folder: Path,
    *,
    ready: bool = True,
    fresh: bool = False,
    in_thread: bool = False,
    stderr: int = 2,
    server: Any = None,
    **engine: Any,
) -> Iterator[ServerProcess]:
    settings = {"model": str(folder), "engine": "mock", **engine}, {"port": 0, **(server or {})}
    running = ServerProcess(*settings, fresh=fresh, in_thread=in_thread, stderr=stderr)
    try:
        if ready:
            running.wait_until_ready()
        yield running
    finally:
        running.close()


class Log(NamedTuple):
    """A file that processes append their logs to. What pytest captures may be lost or mixed up while they write."""

    path: Path
    descriptor: int

    def lines(self) -> list[str]:
        """All whole lines."""
        return self.path.read_text("utf-8").split("\n")[:-1]


class Asking(threading.Thread):
    """A long streaming request in the background; collects its lines."""

    def __init__(self, url: str, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.url = url
        self.body = {"messages": QUESTION, "ignore_eos": True, "max_tokens": max_tokens}
        self.lines: list[str] = []
        self.first: queue.Queue[None] = queue.Queue()
        self.start()
        self.first.get(timeout=60)

    def run(self) -> None:
        with contextlib.suppress(httpx.RemoteProtocolError), stream_lines(self.url, self.body) as lines:
            for line in lines:
                if line:
                    self.lines.append(line)
                    self.first.put(None)

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.lines[-1].removeprefix("data: "))["error"]


def test_the_frontend_never_imports_torch(folder):
    code = (
        "import sys, vlmserve.server.run, vlmserve.server.web, vlmserve.frontend.client, vlmserve.frontend.requests\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(vlmserve.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_drains_answers_and_rejects_new_ones(folder, number, capfd):
    with serving(folder, mock_tpot=0.02) as server:
        engine = server.engine()
        asking = Asking(server.url, max_tokens=60)
        server.process.send_signal(number)
        wait_until(lambda: server.health().status_code == 503)
        assert server.health().json()["status"] == "closing"
        late = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": QUESTION}, timeout=60)
        assert late.status_code == 503
        assert "shutting down" in late.json()["error"]["message"]
        asking.join(60)
        assert asking.lines[-1] == "data: [DONE]"
        assert server.process.wait(60) == 0
        assert not engine.is_running()
    assert f"Stopping: got {number.name}" in capfd.readouterr().err


def test_answers_over_the_grace_end_with_errors(folder):
    with serving(folder, in_thread=True, mock_tpot=0.05, server={"shutdown_grace": 0.1}) as server:
        whole: list[httpx.Response] = []
        body = {"messages": QUESTION, "ignore_eos": True, "max_tokens": 400}

        def ask() -> None:
            whole.append(httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60))

        waiting = threading.Thread(target=ask, daemon=True)
        waiting.start()
        asking = Asking(server.url, max_tokens=400)
        wait_until(lambda: re.search(r"num_requests_running{.*} 2.0", server.metrics()) is not None)
        server.process.terminate()
        asking.join(60)
        waiting.join(60)
        assert asking.error["code"] == "unavailable"
        assert (whole[0].status_code, whole[0].json()["error"]["code"]) == (503, "unavailable")
        assert whole[0].headers["connection"] == "close"
        assert server.process.wait(60) == 0


def test_while_it_drains_new_requests_are_sent_elsewhere(folder):
    large = {"messages": QUESTION, "user": "x" * 5_000_000}
    with serving(folder, in_thread=True, mock_tpot=0.02) as server, httpx.Client(timeout=60) as kept:
        url = f"{server.url}/v1/chat/completions"
        assert kept.post(url, json={"messages": QUESTION, "max_tokens": 1}).headers.get("connection") != "close"
        assert kept.get(f"{server.url}/ready").json() == {"status": "ok"}
        asking = Asking(server.url, max_tokens=150)
        server.process.terminate()
        wait_until(lambda: kept.get(f"{server.url}/ready").status_code == 503)
        assert kept.get(f"{server.url}/ready").json()["status"] == "closing"
        for body in ({"messages": QUESTION}, large):
            refused = kept.post(url, json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.headers["connection"] == "close"
        asking.join(60)
        assert asking.lines[-1] == "data: [DONE]"
        assert server.process.wait(60) == 0


def test_a_second_signal_ends_it_at_once(folder):
    with serving(folder, mock_tpot=0.05) as server:
        engine = server.engine()
        asking = Asking(server.url, max_tokens=400)
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: server.health().status_code == 503)
        time.sleep(SIGNAL_ECHO)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 1
        wait_until(lambda: not engine.is_running())
        assert asking.lines


def test_group_signal_spares_the_engine_and_counts_once(folder):
    with serving(folder, mock_tpot=0.02) as server:
        asking = Asking(server.url, max_tokens=40)
        for number in (signal.SIGINT, signal.SIGTERM):
            server.engine().send_signal(number)
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGINT)
        asking.join(60)
        assert asking.lines[-1] == "data: [DONE]"
        assert server.process.wait(60) == 0


def test_killed_server_takes_engine_and_files_along(folder, temporary):
    with serving(folder, ready=False) as server:
        line = server.wait_until_ready()
        assert f"(model {folder.name}, cpu, float32, KV cache " in line
        assert server.health().json() == {"status": "ok"}
        engine = server.engine()
        assert list(temporary.iterdir())
        server.process.kill()
        wait_until(lambda: not engine.is_running())
        assert not list(temporary.iterdir())


@pytest.fixture
def log(tmp_path) -> Iterator[Log]:
    with (tmp_path / "log").open("ab") as file:
        yield Log(Path(file.name), file.fileno())


def test_busy_activity_is_logged_requests_only_if_wanted(folder, log):
    def activity() -> list[str]:
        return [line for line in log.lines() if "tokens/s" in line]

    def fell_idle() -> bool:
        return " 0 running, 0 waiting | prompt " in "".join(activity()[-1:])

    settings = {"stats_interval": 0.2, "access_log": False}
    with serving(folder, in_thread=True, stderr=log.descriptor, mock_tpot=0.02, server=settings) as server:
        Asking(server.url, max_tokens=60).join(60)
        wait_until(fell_idle)
        said = activity()
        assert any(" 1 running, 0 waiting | prompt " in line for line in said)
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    assert activity() == said
    assert not any("POST /v1/chat/completions" in line for line in log.lines())


def test_each_request_has_a_line_in_the_log(folder, capfd):
    with serving(folder, in_thread=True, server={"access_log": True}) as server:
        assert httpx.get(f"{server.url}/v1/models").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    assert "GET /v1/models 200" in capfd.readouterr().err


def test_whole_log_can_be_json(tmp_path, log):
    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in log.lines()]

    def find(text: str) -> dict[str, Any]:
        wait_until(lambda: any(text in line["message"] for line in lines()))
        return next(line for line in lines() if text in line["message"])

    engine = {"engine": "real", "device": "cpu", "dtype": "float32", "kv_cache_memory": "8MiB", "num_threads": 1}
    server = {"log_format": "json", "log_prompts": True, "restart_backoff": 0.0, "served_model_name": ["tiny"]}
    folder = make_llama(tmp_path / "model")
    with serving(folder, ready=False, fresh=True, stderr=log.descriptor, server=server, **engine) as running:
        ready = find("vlmserve is ready")
        assert (ready["level"], ready["process"], ready["model"]) == ("info", "server", "tiny")
        body = {"messages": QUESTION, "max_tokens": 2, "ignore_eos": True, "temperature": 0}
        url = f"{ready['url']}/v1/chat/completions"
        answer = httpx.post(url, json=body, headers={"x-request-id": "one"}, timeout=60).json()
        line = find(answer["id"])
        assert line["logger"] == "vlmserve.access"
        assert {name: line[name] for name in ("method", "path", "status", "request_id", "client", "response_id")} == {
            "method": "POST", "path": "/v1/chat/completions", "status": 200, "request_id": "one",
            "client": "127.0.0.1", "response_id": answer["id"],
        }  # fmt: skip
        assert (line["prompt_tokens"], line["completion_tokens"]) == (answer["usage"]["prompt_tokens"], 2)
        assert 0 < line["seconds"] < 60
        assert find("one says")["prompt"] == {"messages": QUESTION}
        httpx.post(url, json={**body, "max_tokens": -1}, headers={"x-request-id": "two"}, timeout=60)
        line = find(", two")
        assert (line["status"], line["error"]) == (400, "invalid_request")
        running.engine().kill()
        assert find("killed by SIGKILL")["level"] == "error"
        find("The engine runs again")
        assert httpx.post(url, json=body, timeout=60).json()["choices"] == answer["choices"]
    assert {line["process"] for line in lines()} == {"server", "engine"}


def test_fatal_error_is_the_last_json_log_line(folder):
    arguments = ["--engine", "mock", "--port", "0", "--log-format", "json", "--max-model-len", "99999999"]
    program = [sys.executable, "-m", "vlmserve", "serve", str(folder), *arguments]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")
    *_, last = map(json.loads, done.stderr.splitlines())
    assert last["level"] == "critical"
    assert "--max-model-len" in last["message"]


def test_an_address_in_use_is_a_clear_error(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with serving(folder, ready=False, server={"port": port}) as server:
            assert server.process.wait(60) == 1
            assert f"ConfigurationError cannot listen on 127.0.0.1 port {port}" in server.process.stdout.read()


def test_a_folder_without_weights_is_a_clear_error(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with serving(tmp_path, ready=False) as server:
        assert server.process.wait(60) == 1
        assert server.process.stdout.read().startswith("MissingWeightsError")


def test_engine_load_error_keeps_its_class(folder):
    with serving(folder, ready=False, fresh=True, max_model_len=10**6) as server:
        assert server.process.wait(60) == 1
        assert server.process.stdout.read().startswith("CapacityError")


def test_a_signal_while_loading_ends_it(folder):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with serving(folder, ready=False, fresh=True, server={"port": port}) as server:
        server.url = f"http://127.0.0.1:{port}"
        wait_until(lambda: _answers(server))
        server.process.terminate()
        assert server.process.wait(60) == 0


def _answers(server: ServerProcess) -> bool:
    try:
        return server.health().status_code in (200, 503)
    except httpx.ConnectError:
        return False


def test_lazy_server_loads_at_the_first_request(folder):
    with serving(folder, ready=False, load="lazy") as server:
        line = server.process.stdout.readline()
        assert line.startswith("vlmserve listens on http"), line
        server.url = line.split()[3].rstrip(";")
        assert server.health().json() == {"status": "asleep"}
        assert psutil.Process(server.process.pid).children() == []
        body = {"messages": QUESTION, "max_tokens": 3}
        answers = [httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert server.health().json() == {"status": "ok"}
        assert server.engine().is_running()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_unused_lazy_server_stops_when_told(folder):
    with serving(folder, ready=False, load="lazy") as server:
        server.process.stdout.readline()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
