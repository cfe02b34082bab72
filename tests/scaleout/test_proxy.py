"""What a gateway does with a request, with workers in this process."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.scaleout.test_converge import Cluster, WholeAnswer
from vlmserve.scaleout.messages import LOST_PATH, SEED_HEADER
from vlmserve.scaleout.settings import GatewayConfig
from vlmserve.scaleout.upstream import UpstreamError


async def test_overloaded_gateway_rejects_with_a_retry_time(tmp_path):
    cluster = Cluster(tmp_path)
    cluster.start("first")
    gateway = cluster.gateways[0]
    gateway.settings = GatewayConfig(max_in_flight=1)
    with gateway.admit():
        answer = await cluster.post("/v1/completions", model="fixed", prompt="x")
        assert answer.status_code == 429
        assert answer.headers["retry-after"]
    assert (await cluster.post("/v1/completions", model="fixed", prompt="x")).status_code == 200


async def test_rejection_of_a_full_worker_outlives_lost_connections(tmp_path):
    cluster = Cluster(tmp_path)
    asked: list[str] = []

    def reject(worker: Any) -> None:
        @contextlib.asynccontextmanager
        async def request(*_: Any) -> AsyncIterator[WholeAnswer]:
            asked.append(worker.url)
            if len(asked) == 2:
                raise UpstreamError("the connection was closed")
            yield WholeAnswer(429, [(b"retry-after", b"7")], b"full")

        worker.request = request

    for name in ("first", "second"):
        reject(cluster.start(name))
    answer = await cluster.post("/v1/completions", model="fixed", prompt="x")
    assert len({*asked}) == 2
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")


async def test_retried_request_keeps_its_seed(tmp_path):
    cluster = Cluster(tmp_path)
    seeds: list[str] = []

    def record(worker: Any) -> None:
        asked = worker.request

        def request(method: str, path: str, headers: Any = (), body: bytes = b"") -> Any:
            seeds.append(dict(headers)[SEED_HEADER])
            worker.is_up = len(seeds) != 1
            return asked(method, path, headers, body)

        worker.request = request

    for name in ("first", "second"):
        record(cluster.start(name))
    for _ in range(2):
        assert (await cluster.post("/v1/completions", model="fixed", prompt="x")).text == "fixed"
    assert len(seeds) == 3
    assert seeds[0] == seeds[1] != seeds[2]


CREATED = {"type": "response.created", "response": {"id": "resp_1", "status": "in_progress", "store": True}}
FIRST = f"event: response.created\ndata: {json.dumps(CREATED)}\n\n".encode()


class CutAnswer(WholeAnswer):
    """A stream whose worker dies after the first event."""

    async def read(self) -> bytes:
        if not (data := await super().read()):
            raise UpstreamError("the connection was closed")
        return data


def cut_off(worker: Any, lost: list[dict[str, Any]]) -> None:
    """Let a worker die while it answers, and reject the first lost response."""

    @contextlib.asynccontextmanager
    async def request(method: str, path: str, headers: Any = (), body: bytes = b"") -> AsyncIterator[WholeAnswer]:
        if path == LOST_PATH:
            lost.append(json.loads(bytes(body)))
            yield WholeAnswer(503 if len(lost) == 1 else 200, [], b"{}")
        else:
            yield CutAnswer(200, [(b"content-type", b"text/event-stream")], FIRST)

    worker.request = request


@pytest.mark.parametrize(
    ("path", "start", "fields"),
    [
        ("/v1/chat/completions", "data: ", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/messages", "event: error\ndata: ", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}),
        ("/v1/responses", "event: response.failed\ndata: ", {"input": "x", "store": False}),
    ],
)
async def test_stream_of_dead_worker_ends_with_error(tmp_path, path, start, fields):
    cluster = Cluster(tmp_path)
    lost: list[dict[str, Any]] = []
    cut_off(cluster.start("first"), lost)
    answer = await cluster.post(path, model="fixed", stream=True, **fields)
    first, last = answer.text.removesuffix("\n\n").split("\n\n")
    assert f"{first}\n\n".encode() == FIRST
    assert last.startswith(start)
    event = json.loads(last.removeprefix(start))
    error = event["response"]["error"] if path == "/v1/responses" else event["error"]
    assert "the connection was closed" in error["message"]
    assert "send the request again" in error["message"]
    assert not lost


async def test_lost_response_is_offered_to_other_workers(tmp_path):
    cluster = Cluster(tmp_path)
    lost: list[dict[str, Any]] = []
    for name in ("first", "second"):
        cut_off(cluster.start(name), lost)
    answer = await cluster.post("/v1/responses", model="fixed", input="x", stream=True)
    [*_, last] = answer.text.removesuffix("\n\n").split("\n\n")
    failed = json.loads(last.partition("data: ")[2])["response"]
    assert (failed["id"], failed["status"], failed["error"]["code"]) == ("resp_1", "failed", "server_error")
    sent = {"model": "fixed", "input": "x", "stream": True}
    assert lost == [{"request": sent, "response": failed}] * 2
