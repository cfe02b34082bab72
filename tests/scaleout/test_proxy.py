"""What a gateway does with a request, with workers in this process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from tests.scaleout.test_converge import Cluster, WholeAnswer
from vlmserve.scaleout.messages import SEED_HEADER
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
