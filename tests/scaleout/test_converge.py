"""Workers that join, are started again or were away serve the adapters that were loaded while the cluster runs.

Workers are real but for their engines, and gateways hear them without a network.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from vlmserve.errors import AdapterError, UnknownModelError
from vlmserve.scaleout import converge
from vlmserve.scaleout.app import create_app
from vlmserve.scaleout.converge import Member
from vlmserve.scaleout.door import Door
from vlmserve.scaleout.gateway import Gateway
from vlmserve.scaleout.messages import TOKEN_HEADER
from vlmserve.scaleout.settings import GatewayConfig
from vlmserve.scaleout.upstream import Upstream, UpstreamError
from vlmserve.server.adapters import Adapters
from vlmserve.server.body import BodyMemory
from vlmserve.server.demand import Demand
from vlmserve.settings.config import EngineConfig, ServerConfig
from vlmserve.types import AdapterInfo, EngineStats

TOKEN = "a token of the test"
MIXED = ("0", "1", "2")


class Engine:
    """An engine's client that serves folders. configured: of the settings, by names."""

    kv_cache_tokens = 0

    def __init__(self, configured: Mapping[str, Path]) -> None:
        self.adapters: dict[str, AdapterInfo] = {}
        self.calls = self
        self.alive = True
        self.loads = 0
        for name, folder in configured.items():
            self._serve(name, folder, {})

    async def load_adapter(self, name: str, path: str, pool: Mapping[str, str] | None = None) -> AdapterInfo:
        await asyncio.sleep(0)
        self.loads += 1
        self._serve(name, Path(path), pool or {})
        return self.adapters[name]

    async def unload_adapter(self, name: str) -> None:
        await asyncio.sleep(0)
        if self.adapters.pop(name, None) is None:
            raise UnknownModelError(f"there is no adapter {name!r} here", param="lora_name")

    def _serve(self, name: str, folder: Path, pool: Mapping[str, str]) -> None:
        if not folder.is_dir():
            raise AdapterError(f"{folder} is not an adapter")
        own = {number: f"{folder.name}/{number}" for number in MIXED} if folder.name == "mixture" else {}
        mixes = {number: path for number, path in {**own, **pool}.items() if path}
        digest = ", ".join([folder.name, *(f"{number} = {Path(path).name}" for number, path in sorted(mixes.items()))])
        self.adapters[name] = AdapterInfo(name, str(folder), digest, 1, 1, mixes=sorted(mixes))


class WholeAnswer:
    """A worker's answer (`upstream.Answer`) that has arrived."""

    def __init__(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        self.status, self.headers = status, headers
        self._body = body

    async def read(self) -> bytes:
        body, self._body = self._body, b""
        return body

    read_all = read

    def passed_on(self) -> list[tuple[bytes, bytes]]:
        return self.headers


class Worker:
    """A worker without a model, in this process. Each start has another id."""

    def __init__(self, name: str, folder: Path, number: int) -> None:
        self.url = f"http://{name}.{number}"
        self.engine = Engine({"fixed": folder.parent / "fixed", "experts": folder.parent / "mixture"})
        config = EngineConfig(
            model="m", enable_lora=True,
            lora_modules=[f"fixed={folder.parent / 'fixed'}", f"experts={folder.parent / 'mixture'}"],
        )  # fmt: skip
        self.adapters = Adapters(config, ServerConfig(lora_folder=str(folder)))
        service = SimpleNamespace(
            adapters=self.adapters,
            client=self.engine,
            info=self.engine,
            names=SimpleNamespace(
                adapter_infos=lambda: ((name, self.engine.adapters.get(name)) for name in sorted(self.engine.adapters)),
                all=("m",),
                own=("m",),
                is_own=lambda name: name in (None, "m"),
            ),
            check_serving=lambda: None,
            wake=_nothing,
            bodies=BodyMemory(2**20),
            demand=Demand(is_lazy=False),
            engine_stats=EngineStats,
            abilities=None,
            phase="serving",
            created=1,
            num_answers=0,
        )
        self.is_up = True
        self.door = Door(self._answer, cast(Any, service), name=name, token=TOKEN, capacity=1)

    @property
    def served(self) -> dict[str, str]:
        """The content of its adapters, by their names."""
        return {name: info.digest for name, info in sorted(self.engine.adapters.items())}

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A request's answer: what the adapter that it names is."""
        name = (await Request(scope, receive).json())["model"]
        await PlainTextResponse(self.served[name])(scope, receive, send)

    @contextlib.asynccontextmanager
    async def request(self, method: str, path: str, headers: Any = (), body: bytes = b"") -> AsyncIterator[WholeAnswer]:
        """As `Upstream.request`."""
        await asyncio.sleep(0)
        if not self.is_up:
            raise UpstreamError("it is down")
        transport = httpx.ASGITransport(self.door)
        async with httpx.AsyncClient(transport=transport, base_url=self.url, headers={TOKEN_HEADER: TOKEN}) as client:
            answer = await client.request(method, path, headers=list(headers), content=bytes(body))
        yield WholeAnswer(answer.status_code, answer.headers.raw, answer.content)


async def _nothing() -> None:
    pass


class Cluster:
    """Workers that share a folder, and gateways, which hear of changes when they are told to look."""

    def __init__(self, base: Path, gateways: int = 1) -> None:
        self.folder = base / "folder"
        for name in ("folder/a", "folder/b", "folder/c", "fixed", "mixture"):
            (base / name).mkdir(parents=True)
        self.gateways = [Gateway(ServerConfig(), GatewayConfig(), TOKEN) for _ in range(gateways)]
        self.workers: dict[str, Worker] = {}
        self._starts = 0

    def start(self, name: str) -> Worker:
        """A worker, in place of the one of that name."""
        if name in self.workers:
            self.stop(name)
        self._starts += 1
        worker = self.workers[name] = Worker(name, self.folder, self._starts)
        for gateway in self.gateways:
            gateway.members[worker.url] = Member(worker.url, cast(Upstream, worker))
        self.hear()
        return worker

    def stop(self, name: str) -> None:
        worker = self.workers.pop(name)
        worker.is_up = False
        for gateway in self.gateways:
            del gateway.members[worker.url]
            gateway.adapters.leave(worker.url)
            gateway.update_models()

    def hear(self) -> None:
        """Every gateway hears every worker that has something new."""
        for gateway in self.gateways:
            for worker in self.workers.values():
                member, hello = gateway.members[worker.url], worker.door.hello()
                if worker.is_up and (member.hello is None or member.hello.facts != hello.facts):
                    gateway.hear(member, hello)

    async def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline, {name: worker.served for name, worker in self.workers.items()}
            await asyncio.sleep(0)
            self.hear()

    async def post(self, path: str, gateway: int = 0, **body: Any) -> httpx.Response:
        """A client's request, while gateways hear their workers."""
        transport = httpx.ASGITransport(create_app(self.gateways[gateway]))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            asking = asyncio.ensure_future(client.post(path, json=body))
            await self.until(asking.done)
            return asking.result()

    async def load(self, name: str, path: str, gateway: int = 0, **fields: Any) -> httpx.Response:
        return await self.post("/v1/load_lora_adapter", gateway, lora_name=name, lora_path=path, **fields)

    async def unload(self, name: str, gateway: int = 0, **fields: Any) -> httpx.Response:
        return await self.post("/v1/unload_lora_adapter", gateway, lora_name=name, **fields)

    def agree(self) -> bool:
        """Whether all workers serve the same, and all gateways know it."""
        contents = [worker.served for worker in self.workers.values()]
        names = contents[0].keys()
        return all(one == contents[0] for one in contents) and all(
            gateway.models["m"].adapters.keys() == names and not gateway.models["m"].lacking
            for gateway in self.gateways
        )


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    monkeypatch.setattr(converge, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(converge, "LAST_PAUSE", 0.001)
    return Cluster(tmp_path)


MIXTURE = "mixture, 0 = 0, 1 = 1, 2 = 2"


async def test_joining_or_restarted_worker_serves_loaded_adapters(cluster):
    cluster.start("first")
    assert (await cluster.load("poems", "a")).status_code == 200
    assert (await cluster.load("gone", "b")).status_code == 200
    assert (await cluster.unload("gone")).status_code == 200
    assert (await cluster.load("fixed", "c", load_inplace=True)).status_code == 200
    joined = cluster.start("second")
    await cluster.until(cluster.agree)
    assert joined.served == {"experts": MIXTURE, "fixed": "c", "poems": "a"}
    again = cluster.start("first")
    await cluster.until(cluster.agree)
    assert again.served == joined.served
    assert again.engine.loads == 2


async def test_joining_worker_does_not_serve_unloaded_adapters(cluster):
    cluster.start("first")
    assert (await cluster.unload("fixed")).status_code == 200
    joined = cluster.start("second")
    await cluster.until(cluster.agree)
    assert joined.served == {"experts": MIXTURE}
    gateway = cluster.gateways[0]
    with pytest.raises(UnknownModelError):
        gateway.model("fixed")


async def test_requests_go_to_workers_with_current_adapters(cluster):
    first = cluster.start("first")
    assert (await cluster.load("fixed", "c", load_inplace=True)).status_code == 200
    joined = cluster.start("second")
    gateway = cluster.gateways[0]
    ids = {worker: gateway.members[worker.url].hello.info.id for worker in (first, joined)}
    assert gateway.lacking("fixed") == {ids[joined]}, "it has another one under that name"
    assert not gateway.lacking("experts")
    await cluster.until(cluster.agree)
    assert not gateway.lacking("fixed")


async def test_all_workers_gone_and_back(cluster):
    cluster.start("first")
    assert (await cluster.load("poems", "a")).status_code == 200
    cluster.stop("first")
    back = cluster.start("first")
    own, _ = cluster.gateways[0].model("poems")
    assert own == "m", "it is known, and will be there"
    answer = await cluster.post("/v1/completions", model="poems", prompt="x")
    assert (answer.status_code, answer.text) == (200, "a"), "it waits until the worker has it"
    assert back.served["poems"] == "a"


async def test_request_for_an_unloadable_adapter_is_rejected(cluster):
    cluster.gateways[0].patience = 0.05
    cluster.start("first")
    assert (await cluster.load("poems", "a")).status_code == 200
    cluster.stop("first")
    cluster.start("first").adapters.folder = cluster.folder.parent / "elsewhere"
    answer = await cluster.post("/v1/completions", model="poems", prompt="x")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert answer.headers["retry-after"]


async def test_another_gateway_learns_of_changes_from_workers(tmp_path, monkeypatch):
    cluster = Cluster(tmp_path, gateways=2)
    cluster.start("first")
    cluster.start("second")
    assert (await cluster.load("poems", "a", gateway=0)).status_code == 200
    assert (await cluster.load("poems", "b", gateway=1, load_inplace=True)).status_code == 200
    cluster.gateways[0] = Gateway(ServerConfig(), GatewayConfig(), TOKEN)
    for worker in cluster.workers.values():
        cluster.gateways[0].members[worker.url] = Member(worker.url, cast(Upstream, worker))
    joined = cluster.start("third")
    await cluster.until(cluster.agree)
    assert joined.served["poems"] == "b"


async def test_a_worker_that_failed_is_asked_again(cluster):
    first = cluster.start("first")
    second = cluster.start("second")
    second.adapters.folder = cluster.folder.parent / "elsewhere"
    answer = await cluster.load("poems", "a")
    assert answer.status_code == 400
    assert answer.json()["workers"]["first"] == "ok"
    assert "not" in answer.json()["workers"]["second"]
    assert first.served["poems"] == "a"
    gateway = cluster.gateways[0]
    assert gateway.lacking("poems") == {gateway.members[second.url].hello.info.id}
    second.adapters.folder = cluster.folder
    await cluster.until(cluster.agree)
    assert second.served["poems"] == "a"


async def test_unloadable_adapter_is_not_retried(cluster):
    first = cluster.start("first")
    assert (await cluster.load("poems", "nothing")).status_code == 400
    joined = cluster.start("second")
    await cluster.until(cluster.agree)
    assert (first.engine.loads, joined.engine.loads) == (1, 0)
    assert (await cluster.unload("poems")).status_code == 404


async def test_x_lora_changes_reach_all_workers(cluster):
    cluster.start("first")
    cluster.start("second")
    assert (await cluster.unload("1", mixture="experts")).status_code == 200
    assert (await cluster.load("2", "b", mixture="experts", load_inplace=True)).status_code == 200
    again = await cluster.load("2", "c", mixture="experts")
    assert again.status_code == 400
    assert "already" in again.json()["error"]["message"]
    joined = cluster.start("third")
    await cluster.until(cluster.agree)
    assert joined.served["experts"] == "mixture, 0 = 0, 2 = b"
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(create_app(cluster.gateways[0])), base_url="http://gateway"
    ) as client:
        cards = {card["id"]: card for card in (await client.get("/v1/models")).json()["data"]}
    assert cards["experts"]["mixes"] == ["0", "2"]
    assert cards["experts"]["root"] == joined.served["experts"]
    assert "mixes" not in cards["fixed"]
    assert (await cluster.load("1", "c", mixture="experts")).status_code == 200
    assert joined.served["experts"] == "mixture, 0 = 0, 1 = c, 2 = b"
    assert cluster.agree()


@pytest.mark.parametrize("seed", range(5))
async def test_whatever_happens_all_come_to_serve_the_same(tmp_path, monkeypatch, seed):
    """Changes by way of two gateways, while workers come, go and are started again."""
    monkeypatch.setattr(converge, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(converge, "LAST_PAUSE", 0.001)
    draw = random.Random(seed)
    cluster = Cluster(tmp_path, gateways=2)
    cluster.start("first")
    for _ in range(30):
        gateway, name = draw.randrange(2), draw.choice(("x", "y", "fixed"))
        match draw.randrange(5):
            case 0:
                cluster.start(draw.choice(("first", "second", "third")))
            case 1 if len(cluster.workers) > 1:
                cluster.stop(draw.choice(sorted(cluster.workers)))
            case 2:
                await cluster.load(name, draw.choice("abc"), gateway, load_inplace=draw.random() < 0.7)
            case 3:
                await cluster.unload(name, gateway)
            case _:
                fields = {"mixture": "experts", "lora_name": draw.choice(MIXED)}
                path = "unload" if draw.random() < 0.5 else "load"
                body = fields if path == "unload" else {**fields, "lora_path": "a", "load_inplace": True}
                await cluster.post(f"/v1/{path}_lora_adapter", gateway, **body)
    cluster.start("last")
    await cluster.until(cluster.agree)
