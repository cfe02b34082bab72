"""A gateway's place on its port is taken by another one."""

from __future__ import annotations

import asyncio
import sys

import httpx
import pytest

from tests.scaleout.processes import TOKEN, Cluster
from tests.scaleout.test_faults import Stream, ask
from tests.waiting import until
from vlmserve.errors import ConfigurationError
from vlmserve.scaleout.launch import MemberProcess
from vlmserve.scaleout.member_messages import HANDED_OVER, GatewayLaunch
from vlmserve.scaleout.settings import GatewayConfig
from vlmserve.settings.config import ServerConfig

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ports pass to other processes on Linux alone")


@pytest.fixture(scope="module")
def cluster(folder):
    with Cluster(folder, 2, engine={"mock_ttft": 0.01, "mock_tpot": 0.03}) as running:
        yield running


def successor(cluster: Cluster, token: str = TOKEN) -> MemberProcess:
    """Another gateway on the port of the cluster's."""
    server = ServerConfig(port=int(cluster.url.rpartition(":")[2]))
    launch = GatewayLaunch(token, server.model_dump_json(), GatewayConfig().model_dump_json(), takes_over=True)
    process = cluster.start(launch)
    process.set_workers([url for _, url in cluster.workers.values()])
    return process


async def test_a_gateway_is_replaced_without_an_error(cluster):
    """Twice, while short requests come over kept and over new connections, and streams are under way at all times."""
    came: list[object] = []
    streams: list[Stream] = []
    stopped = asyncio.Event()
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1}

    async def keep_asking(most_kept: int) -> None:
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_keepalive_connections=most_kept)) as client:
            while not stopped.is_set():
                try:
                    came.append((await client.post(f"{cluster.url}/v1/completions", json=body)).status_code)
                except httpx.HTTPError as error:
                    came.append(repr(error))

    async def keep_streaming() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            while not stopped.is_set():
                streams.append(Stream())
                await ask(client, cluster.url, len(streams), streams[-1])

    gateways = [cluster.gateway]
    tasks = [asyncio.ensure_future(keep_asking(number % 2)) for number in range(4)]
    tasks += [asyncio.ensure_future(keep_streaming()) for _ in range(2)]
    for _ in range(2):
        gateways.append(await asyncio.to_thread(successor, cluster))
        assert await asyncio.to_thread(gateways[-1].wait_until_up) == cluster.url
        before = len(came)
        await until(lambda: len(came) >= before + 20)  # noqa: B023
    stopped.set()
    await asyncio.gather(*tasks)
    assert set(came) == {200}
    assert {(one.status, one.is_done, one.error, one.failure) for one in streams} == {(200, True, None, "")}
    assert [await asyncio.to_thread(gateway.wait, 60) for gateway in gateways[:2]] == [HANDED_OVER, HANDED_OVER]
    cluster.gateway = gateways[-1]


def test_a_gateway_of_another_cluster_is_not_replaced(cluster):
    with pytest.raises(ConfigurationError, match="of another cluster"):
        successor(cluster, "another token").wait_until_up()
    assert httpx.get(f"{cluster.url}/ready").status_code == 200
