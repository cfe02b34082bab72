"""An engine that dies: its requests end at once, another one takes its place, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import psutil

from tests.server.live import QUESTION
from tests.server.process import engines_of
from tests.server.test_run import Asking, ServerProcess, serving
from tests.waiting import until, wait_until
from vlmserve.server import supervision
from vlmserve.server.supervision import Supervisor
from vlmserve.settings.config import ServerConfig

LONG = {"messages": QUESTION, "ignore_eos": True, "max_tokens": 400}
SHORT = {"messages": QUESTION, "max_tokens": 3}
QUICK = {"restart_backoff": 0.05}


def ask(server: ServerProcess, **fields) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", json={**SHORT, **fields}, timeout=60)


GENERATED = "vlmserve:generation_tokens_total"


def is_ready(server: ServerProcess) -> bool:
    return httpx.get(f"{server.url}/ready", timeout=60).status_code == 200


def kill_engine(server: ServerProcess) -> psutil.Process:
    """Kill the engine, and wait until the server knows."""
    engine = server.engine()
    engine.kill()
    wait_until(lambda: not is_ready(server))
    return engine


def restarts(server: ServerProcess) -> float:
    page = httpx.get(f"{server.url}/metrics", timeout=60).text
    [line] = [line for line in page.splitlines() if line.startswith("vlmserve:engine_restarts_total{")]
    return float(line.rsplit(" ", 1)[1])


def killed_under_load(server: ServerProcess, number: int) -> tuple[list[tuple[int, str]], float]:
    """What so many requests, streams and whole answers in turn, end with, and the seconds that took after the kill."""

    async def one(client: httpx.AsyncClient, index: int) -> tuple[int, str]:
        response = await client.post(f"{server.url}/v1/chat/completions", json={**LONG, "stream": index % 2 == 0})
        last = response.text.strip().rsplit("data: ", 1)[-1]
        return response.status_code, json.loads(last)["error"]["code"]

    async def metrics(client: httpx.AsyncClient) -> dict[str, float]:
        page = (await client.get(f"{server.url}/metrics")).text
        return {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if "{" in line}

    async def run() -> tuple[list[tuple[int, str]], float]:
        limits = httpx.Limits(max_connections=number + 1)
        async with httpx.AsyncClient(timeout=60, limits=limits) as client:
            before = (await metrics(client)).get(GENERATED, 0.0)
            tasks = [asyncio.ensure_future(one(client, index)) for index in range(number)]

            async def all_are_known() -> bool:
                now = await metrics(client)
                running, waiting = now["vlmserve:num_requests_running"], now["vlmserve:num_requests_waiting"]
                # Each of those that run has begun its answer.
                return running + waiting == number and now.get(GENERATED, 0.0) - before >= 2 * running

            await until(all_are_known)
            killed = time.monotonic()
            server.engine().kill()
            ends = await asyncio.gather(*tasks)
            return ends, time.monotonic() - killed

    return asyncio.run(run())


def test_all_requests_end_when_the_engine_dies_loaded(folder, temporary):
    with serving(folder, mock_tpot=0.05, max_num_seqs=8, server=QUICK) as server:
        first = server.engine().pid
        ends, seconds = killed_under_load(server, 24)
        print(f"24 requests ended {seconds:.2f} s after the engine was killed")
        assert sorted(set(ends)) == [(200, "engine_dead"), (503, "engine_dead")]
        wait_until(lambda: is_ready(server))
        assert ask(server).status_code == 200
        assert server.engine().pid != first
        assert restarts(server) == 1
        assert len(list(temporary.iterdir())) == 1, "the folder of the first engine's socket is gone"


def test_restarting_server_lives_but_is_not_ready(folder):
    with serving(folder, server={"restart_backoff": 30}) as server:
        kill_engine(server)
        wait_until(lambda: int(httpx.get(f"{server.url}/ready", timeout=60).headers.get("retry-after", 0)) > 20)
        ready = httpx.get(f"{server.url}/ready", timeout=60)
        assert (ready.status_code, ready.json()["status"]) == (503, "restarting")
        assert "SIGKILL" in ready.json()["reason"]
        assert 20 < int(ready.headers["retry-after"]) < 120
        health = server.health()
        assert (health.status_code, health.json()["status"]) == (200, "restarting")
        refused = ask(server)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert 20 < int(refused.headers["retry-after"]) < 120
        assert httpx.get(f"{server.url}/v1/models", timeout=60).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0, "a restart does not hold up the end"


def test_engine_answering_between_crashes_leaves_nothing(folder):
    with serving(folder, server={**QUICK, "max_restarts": 1}) as server:
        process = psutil.Process(server.process.pid)
        for round_number in (1, 2):
            kill_engine(server)
            wait_until(lambda: is_ready(server))
            assert ask(server).status_code == 200
            assert restarts(server) == round_number
            assert len(engines_of(process.pid)) == 1
            if round_number == 1:
                files, threads = process.num_fds(), process.num_threads()
        # Those of connections that are just closing go away by themselves.
        wait_until(lambda: process.num_fds() <= files and process.num_threads() <= threads)


def test_long_running_engine_may_die_again(folder):
    with serving(folder, server={**QUICK, "max_restarts": 1, "restart_window": 0}) as server:
        for _ in range(2):
            kill_engine(server)
            wait_until(lambda: is_ready(server))


def last_line(server: ServerProcess) -> str:
    assert server.process.wait(60) == 1
    return server.process.stdout.read().splitlines()[-1]


def test_crash_loop_ends_with_a_clear_line(folder):
    with serving(folder, server={**QUICK, "max_restarts": 1}) as server:
        kill_engine(server)
        wait_until(lambda: is_ready(server))
        server.engine().kill()
        line = last_line(server)
    assert line == (
        "EngineDeadError The engine process was killed by SIGKILL. The engine has died 2 times in a row "
        "(--max-restarts); the server exits"
    )


def test_engine_exception_is_named_to_its_caller(folder):
    # No clock can sleep that long, so the engine's second step raises.
    with serving(folder, mock_tpot=1e10, server={**QUICK, "max_restarts": 1}) as server:
        first = ask(server)
        assert (first.status_code, first.json()["error"]["code"]) == (503, "engine_dead")
        assert "OverflowError" in first.json()["error"]["message"]
        assert int(first.headers["retry-after"]) >= 1
        wait_until(lambda: is_ready(server))
        second = Asking(server.url, max_tokens=5)
        second.join(60)
        assert second.error["code"] == "engine_dead"
        line = last_line(server)
    assert "OverflowError" in line
    assert line.endswith("died 2 times in a row (--max-restarts); the server exits")


def test_engine_failing_to_reload_is_given_up(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with serving(tmp_path, server={**QUICK, "max_restarts": 1}) as server:
        (tmp_path / "tokenizer.json").unlink()
        server.engine().kill()
        line = last_line(server)
    assert "tokenizer.json" in line
    assert "died 2 times in a row" in line


def test_without_restarts_the_server_ends_with_its_engine(folder):
    with serving(folder, mock_tpot=0.05, server={"max_restarts": 0}) as server:
        asking = Asking(server.url, max_tokens=400)
        server.engine().kill()
        asking.join(60)
        assert asking.error["code"] == "engine_dead"
        assert "died once" in last_line(server)


def test_engine_dying_during_shutdown_is_not_restarted(folder):
    with serving(folder, mock_tpot=0.05, server=QUICK) as server:
        asking = Asking(server.url, max_tokens=400)
        engine = server.engine()
        server.process.terminate()
        wait_until(lambda: server.health().json()["status"] == "closing")
        os.kill(engine.pid, signal.SIGKILL)
        asking.join(60)
        assert asking.error["code"] == "engine_dead"
        assert server.process.wait(60) == 0


def is_asleep(server: ServerProcess) -> bool:
    return server.health().json()["status"] == "asleep"


def test_idle_model_sleeps_until_a_request(folder):
    with serving(folder, mock_tpot=0.02, server={"sleep_after": 0.05}) as server:
        first = server.engine().pid
        assert ask(server, ignore_eos=True, max_tokens=100).status_code == 200
        assert server.engine().pid == first, "a running request keeps the model"
        wait_until(lambda: is_asleep(server) and not engines_of(server.process.pid))
        assert is_ready(server)
        assert httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
        with ThreadPoolExecutor(4) as pool:
            assert [answer.status_code for answer in pool.map(lambda _: ask(server), range(4))] == [200] * 4
        assert restarts(server) == 0
        wait_until(lambda: is_asleep(server))
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_failed_wake_tells_why_and_is_retried(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with serving(tmp_path, server={"sleep_after": 0.05}) as server:
        wait_until(lambda: is_asleep(server))
        tokenizer = (tmp_path / "tokenizer.json").rename(tmp_path / "hidden")
        answers = [ask(server) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [503, 503]
        assert all("tokenizer.json" in answer.json()["error"]["message"] for answer in answers)
        tokenizer.rename(tmp_path / "tokenizer.json")
        assert ask(server).status_code == 200


def test_stalled_engine_recovers_or_is_restarted(folder):
    with serving(folder, mock_tpot=0.05, server={**QUICK, "engine_silence": 2.0, "engine_timeout": 6.0}) as server:
        engine = server.engine()
        engine.send_signal(signal.SIGSTOP)
        wait_until(lambda: not is_ready(server))
        state = httpx.get(f"{server.url}/ready").json()
        assert state["status"] == "unresponsive"
        assert "not responded" in state["reason"]
        assert httpx.get(f"{server.url}/health").status_code == 200
        page = httpx.get(f"{server.url}/metrics").text
        [line] = [line for line in page.splitlines() if line.startswith("vlmserve:engine_silence_seconds{")]
        assert float(line.rsplit(" ", 1)[1]) >= 2
        engine.send_signal(signal.SIGCONT)
        wait_until(lambda: is_ready(server))
        assert ask(server).status_code == 200
        assert restarts(server) == 0

        engine.send_signal(signal.SIGSTOP)
        answer = ask(server)
        assert answer.status_code == 503
        assert "did not respond for" in answer.json()["error"]["message"]
        wait_until(lambda: is_ready(server))
        assert ask(server).status_code == 200
        assert restarts(server) == 1


def test_an_engine_whose_step_never_ends_is_killed(monkeypatch):
    class Hanging:
        reason = ""

        def __init__(self, step_seconds: float) -> None:
            self.died = asyncio.Event()
            self.heartbeat = SimpleNamespace(silence=0.0, step_seconds=step_seconds)

        def kill(self, reason: str) -> None:
            self.reason = reason
            self.died.set()

    async def supervise(step_seconds: float, step_timeout: float) -> str:
        client = Hanging(step_seconds)
        service = SimpleNamespace(
            config=ServerConfig(step_timeout=step_timeout), metrics=SimpleNamespace(num_served=0), back_at=None,
            phase="closing",
        )  # fmt: skip
        supervisor = Supervisor(service, client, None)  # type: ignore[arg-type]
        asyncio.get_running_loop().call_later(0.2, client.died.set)
        await supervisor.run()
        return client.reason

    monkeypatch.setattr(supervision, "INTERVAL", 0.01)
    assert "at one step for 950 s" in asyncio.run(supervise(950, 900))
    assert asyncio.run(supervise(850, 900)) == ""
    assert asyncio.run(supervise(10**6, 0)) == ""
