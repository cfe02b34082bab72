"""Batches that are cut off, cancelled, too late, too large, or another's; and the requests beside them."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import time
import types

import httpx
import openai
import pytest

from tests.server.live import LiveServer
from tests.server.test_batches import content, finished, line, start, upload
from tests.server.test_run import ServerProcess
from tests.waiting import wait_until
from vlmserve.server.batches.rows import RowAnswer, Rows
from vlmserve.server.keys import add_key, remove_key


@pytest.fixture(scope="module")
def slow(folder, tmp_path_factory):
    """A server on which a row takes a tenth of a second, and two run at a time."""
    server = {
        "storage_path": str(tmp_path_factory.mktemp("slow") / "history.db"), "batch_concurrency": 2, "batch_lease": 0.5,
        "max_batches": 2, "max_file_bytes": 20_000, "max_batch_rows": 100,
    }  # fmt: skip
    with LiveServer(folder, engine={"mock_tpot": 0.02}, server=server) as running:
        yield running


def counts(client, id):
    return client.batches.retrieve(id).request_counts


def test_a_cancelled_batch_keeps_what_is_finished(slow):
    client = slow.openai
    id = start(client, [line(f"{number}") for number in range(100)]).id
    wait_until(lambda: counts(client, id).completed >= 3)
    cancelled = client.batches.cancel(id)
    assert cancelled.status == "cancelling"
    assert cancelled.cancelling_at is not None
    batch = finished(client, id)
    assert batch.status == "cancelled"
    assert batch.cancelled_at >= batch.cancelling_at
    answers = content(client, batch.output_file_id)
    assert 3 <= len(answers) == batch.request_counts.completed < 100
    assert batch.error_file_id is None
    wait_until(lambda: slow.service.num_answers == 0)
    with pytest.raises(openai.BadRequestError, match="cancelled already"):
        client.batches.cancel(id)


def test_rows_over_time_fail_and_answers_are_kept(slow):
    client, store = slow.openai, slow.service.store
    file_id = upload(client, [line(f"{number}") for number in range(100)])
    fields = {"tenant": "", "endpoint": "/v1/chat/completions", "window": "1m", "output_lifetime": None, "metadata": {}}
    store.batches.create("", "batch_late", seconds=1.5, input_file_id=file_id, most=9, **fields)
    batch = finished(client, "batch_late")
    assert batch.status == "expired"
    answers, errors = content(client, batch.output_file_id), content(client, batch.error_file_id)
    assert len(answers) == batch.request_counts.completed
    assert len(errors) == batch.request_counts.failed
    assert {one["error"]["code"] for one in errors} == {"batch_expired"}
    assert {one["custom_id"] for one in [*answers, *errors]} == {f"{number}" for number in range(100)}


def test_server_that_runs_no_batches_says_so(slow, monkeypatch):
    monkeypatch.setattr(slow.service, "config", slow.service.config.model_copy(update={"max_batches": 0}))
    body = {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}
    answer = httpx.post(f"{slow.url}/v1/batches", json=body)
    assert (answer.status_code, "--max-batches" in answer.text) == (503, True)


def test_limits_of_batches(slow):
    client = slow.openai
    too_many = finished(client, start(client, [line(f"{number}", "") for number in range(101)]).id)
    assert [error.code for error in too_many.errors.data] == ["too_many_requests"]
    ids = [start(client, [line(f"{number}") for number in range(50)]).id for _ in range(2)]
    with pytest.raises(openai.RateLimitError, match="2 batches are unfinished"):
        start(client, [line("a")])
    for id in ids:
        client.batches.cancel(id)
        finished(client, id)
    with pytest.raises(openai.APIStatusError):
        upload(client, [line("a", "a" * 30_000)])


def test_too_many_answer_bytes_end_a_batch(slow):
    client = slow.openai
    id = start(client, [line(f"{number}", max_tokens=1) for number in range(100)]).id
    batch = finished(client, id)
    assert batch.status == "failed"
    assert [error.code for error in batch.errors.data] == ["output_too_large"]
    answers = client.files.content(batch.output_file_id).read()
    assert 10_000 < len(answers) < 25_000
    assert len(answers.splitlines()) == batch.request_counts.completed


def test_small_batch_does_not_wait_for_a_large(slow):
    client = slow.openai
    large = start(client, [line(f"{number}", max_tokens=20) for number in range(100)]).id
    wait_until(lambda: client.batches.retrieve(large).status == "in_progress")
    small = start(client, [line("a"), line("b")]).id
    assert finished(client, small).status == "completed"
    assert client.batches.retrieve(large).status == "in_progress"
    client.batches.cancel(large)
    finished(client, large)


class Killed:
    """A server in a process of its own that is killed."""

    def __init__(self, folder, path):
        engine = {"model": str(folder), "engine": "mock", "mock_tpot": 0.01}
        server = {
            "port": 0, "served_model_name": ["tiny"], "storage_path": str(path), "batch_lease": 0.5,
            "batch_concurrency": 4,
        }  # fmt: skip
        self._process = ServerProcess(engine, server, in_thread=True)

    def __enter__(self):
        self._process.wait_until_ready()
        self.openai = openai.OpenAI(base_url=f"{self._process.url}/v1", api_key="none", max_retries=0, timeout=60)
        return self

    def __exit__(self, *_):
        self._process.close()


def test_killed_servers_resume_without_repeating_finished_rows(folder, tmp_path):
    path, moments = tmp_path / "history.db", random.Random(3)
    lines = [line(f"{number}", f"Question {number}?", max_tokens=8) for number in range(80)]
    kept: dict[int, str] = {}
    for run in range(2):
        with Killed(folder, path) as server:
            if run == 0:
                id = start(server.openai, lines).id
            before = len(kept)
            wait_until(lambda: counts(server.openai, id).completed > before)  # noqa: B023
            time.sleep(moments.uniform(0, 0.3))
        with sqlite3.connect(path) as database:
            found = dict(database.execute("SELECT row, body FROM batch_results"))
        assert kept.items() <= found.items(), "what is finished is there, and is not replaced"
        assert len(kept) < len(found) < 80
        kept = found
    with Killed(folder, path) as server:
        batch = finished(server.openai, id)
        assert (batch.status, batch.request_counts.completed, batch.error_file_id) == ("completed", 80, None)
        text = server.openai.files.content(batch.output_file_id).text.splitlines()
        whole = start(server.openai, lines).id
        uninterrupted = content(server.openai, finished(server.openai, whole).output_file_id)
    answers = [json.loads(one) for one in text]
    assert [one["custom_id"] for one in answers] == [f"{number}" for number in range(80)]
    assert all(text[row] == body for row, body in kept.items())
    for one, other in zip(answers, uninterrupted, strict=True):
        assert one["response"]["body"]["choices"] == other["response"]["body"]["choices"]


def test_a_stopped_server_lets_another_one_go_on(folder, tmp_path):
    settings = {"storage_path": str(tmp_path / "history.db"), "batch_lease": 3600}
    with LiveServer(folder, engine={"mock_tpot": 0.05}, server=settings) as first:
        id = start(first.openai, [line(f"{number}") for number in range(200)]).id
        wait_until(lambda: counts(first.openai, id).completed >= 2)
    with LiveServer(folder, server=settings) as second:
        batch = finished(second.openai, id)
        assert batch.request_counts.completed == 200
        assert len(content(second.openai, batch.output_file_id)) == 200


def test_batches_leave_half_of_the_key_limits(folder, tmp_path):
    path = tmp_path / "keys"
    alice = add_key(path, "alice", requests_per_minute=10)
    bob = add_key(path, "bob", max_concurrency=1)
    settings = {"api_keys_file": str(path), "storage_path": str(tmp_path / "history.db")}
    with LiveServer(folder, server=settings) as server:
        a, b = (openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) for key in (alice, bob))
        file_id = upload(b, [line(f"{number}") for number in range(20)])
        with pytest.raises(openai.NotFoundError):
            a.batches.create(input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h")
        id = b.batches.create(input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h").id
        for method in (a.batches.retrieve, a.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                method(id)
        assert [batch.id for batch in b.batches.list()] == [id]
        assert list(a.batches.list()) == []
        batch = finished(b, id)
        assert batch.request_counts.completed == 20
        with pytest.raises(openai.NotFoundError):
            a.files.content(batch.output_file_id)
        stuck = start(a, [line(f"{number}") for number in range(20)]).id  # two of ten requests
        wait_until(lambda: _counts(server, stuck) >= 3)
        time.sleep(0.7)
        assert _counts(server, stuck) <= 5
        assert a.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}]).choices
        remove_key(path, "alice")
        wait_until(lambda: server.service.store.batches.get("key alice", stuck).status == "failed")
        assert server.service.store.batches.get("key alice", stuck).errors[0]["code"] == "key_revoked"


def _counts(server, id):
    return server.service.store.batches.get("key alice", id).num_completed


def test_request_does_not_wait_for_batch_rows(tmp_path):
    from tests.checkpoints import make_llama

    folder = make_llama(tmp_path / "llama", max_position_embeddings=1024)
    engine = {
        "engine": "real", "dtype": "float32", "device": "cpu", "kv_cache_memory": "8MiB", "num_threads": 1,
        "max_num_seqs": 2,
    }  # fmt: skip
    with LiveServer(folder, engine=engine, server={"storage_path": str(tmp_path / "history.db")}) as server:
        client = server.openai
        fields = {"max_tokens": 200, "ignore_eos": True, "temperature": 0, "logprobs": True}
        lines = [line(f"{number}", f"Tell me {number}", **fields) for number in range(8)]
        id = start(client, lines).id
        wait_until(lambda: server.client.stats.num_running == 2 and server.client.stats.num_waiting > 0)
        for _ in range(3):
            answer = server.ask(max_tokens=3, ignore_eos=True)
            assert answer.status_code == 200, answer.text
            assert client.batches.retrieve(id).status == "in_progress"
        assert server.client.stats.preemptions > 0
        answers = content(client, finished(client, id).output_file_id)
        assert len(answers) == 8
        for one in answers:  # rows that gave way have the answer that they have alone
            asked = next(two["body"] for two in lines if two["custom_id"] == one["custom_id"])
            assert (
                one["response"]["body"]["choices"][0]["message"] == server.post(asked).json()["choices"][0]["message"]
            )


@pytest.mark.parametrize(
    ("answers", "asked", "status"),
    [
        ([(429, "overloaded"), (503, "unavailable"), (200, "")], 3, 200),
        ([(400, "invalid_request")], 1, 400),
        ([(503, "engine_dead"), (200, "")], 2, 200),
        ([(503, "engine_dead"), (503, "engine_dead"), (200, "")], 2, 503),
        ([(429, "overloaded")] * 9, 6, 429),
    ],
)
def test_rows_are_asked_again_where_that_helps(answers, asked, status, monkeypatch):
    monkeypatch.setattr("vlmserve.server.batches.rows.FIRST_PAUSE", 0.001)
    rows = Rows(types.SimpleNamespace(check_serving=lambda: None, metrics=None, tracing=None))
    left = iter(answers)
    count = 0

    async def ask(*_):
        nonlocal count
        count += 1
        code, name = next(left)
        return RowAnswer(code, "req-1", json.dumps({"error": {"code": name}}).encode())

    monkeypatch.setattr(rows, "ask", ask)
    answer = asyncio.run(rows.answer(None, None, b""))
    assert (answer.status, count) == (status, asked)
