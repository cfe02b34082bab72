"""A cluster of workers that load models on demand, with mock engines.

The gateway and the workers run in the test, each model in a process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import httpx

from tests.scaleout.ondemand.serving import SIZE, TOKEN
from tests.scaleout.processes import ForkedMember
from tests.waiting import until
from vlmserve.scaleout.app import create_app
from vlmserve.scaleout.gateway import Gateway
from vlmserve.scaleout.member_messages import WorkerLaunch
from vlmserve.scaleout.ondemand.catalogue import Listed
from vlmserve.scaleout.ondemand.host import Host
from vlmserve.scaleout.ondemand.host import create_app as create_host_app
from vlmserve.scaleout.ondemand.shelf import Shelf
from vlmserve.scaleout.settings import GatewayConfig
from vlmserve.server.run import bind
from vlmserve.server.web import WebServer
from vlmserve.settings.config import ServerConfig


class Hosted:
    """A worker of several models. room: models that fit into memory."""

    def __init__(self, name: str, listed: Sequence[Listed], room: int, patience: float) -> None:
        self.started: list[ForkedMember] = []
        self.kills_loads = False
        """True: models' processes die while they load."""
        self.shelf = Shelf(int((room + 0.6) * SIZE), patience)
        own = ServerConfig(port=0, host="127.0.0.1")
        self.host = Host(name, TOKEN, listed, self.shelf, self.start, load_timeout=600, address="127.0.0.1")
        self._web = WebServer(create_host_app(self.host, TOKEN), own, bind(own))
        self._web.start()
        self.url = self._web.url

    def start(self, launch: WorkerLaunch) -> ForkedMember:
        process = ForkedMember(launch, patience=10.0, in_threads=True)
        self.started.append(process)
        if self.kills_loads:
            os.kill(process.pid, signal.SIGKILL)
        return process

    async def close(self) -> None:
        await self.host.close(5.0)
        await self._web.stop()


class Hosting:
    """Use as an asynchronous context manager. rooms: of each worker."""

    def __init__(self, listed: Sequence[Listed], rooms: Sequence[int] = (1, 1), *, patience: float = 60.0) -> None:
        self._listed, self._rooms, self._patience = listed, rooms, patience

    async def __aenter__(self) -> Hosting:
        front = ServerConfig(port=0, access_log=False)
        self.gateway = Gateway(front, GatewayConfig(), TOKEN)
        self.workers = [self.new_worker(f"worker-{number}", room) for number, room in enumerate(self._rooms)]
        self._web = WebServer(create_app(self.gateway), front, bind(front))
        self._web.start()
        self.gateway.set_workers([worker.url for worker in self.workers])
        self.client = httpx.AsyncClient(base_url=self._web.url, timeout=120)
        await until(self._all_are_known)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()
        for worker in self.workers:
            await worker.close()
        await self._web.stop()
        await self.gateway.close()

    def new_worker(self, name: str, room: int) -> Hosted:
        return Hosted(name, self._listed, room, self._patience)

    def _all_are_known(self) -> bool:
        """The gateway has heard how large each model of each worker is, or why it cannot be loaded."""
        offers = [member.offer for member in self.gateway.members.values() if member.offer is not None]
        return len(offers) == len(self._rooms) and all(
            one.size or one.reason for offer in offers for one in offer.models
        )

    async def ask(self, model: str | None, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        body = {"prompt": "What is", "max_tokens": 4, **fields} if path == "/v1/completions" else fields
        return await self.client.post(path, json=body if model is None else {"model": model, **body})

    async def states(self) -> dict[str, str]:
        listed = (await self.client.get("/v1/models")).json()["data"]
        return {card["id"]: card["state"] for card in listed}

    def loaded(self) -> list[set[str]]:
        """The models that each worker has loaded."""
        return [
            {name for name, model in worker.host.pool.models.items() if model.state == "loaded"}
            for worker in self.workers
        ]
