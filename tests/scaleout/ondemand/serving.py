"""A server of several models with mock engines: the gateway runs in the test, each worker in a process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.mock_checkpoint import make_mock_checkpoint
from tests.scaleout.processes import ForkedMember
from vlmserve.scaleout.member_messages import WorkerLaunch
from vlmserve.scaleout.ondemand.app import create_app
from vlmserve.scaleout.ondemand.catalogue import Listed, find_models
from vlmserve.scaleout.ondemand.gateway import OnDemandGateway
from vlmserve.scaleout.ondemand.pool import Model, Pool
from vlmserve.scaleout.ondemand.shelf import Shelf
from vlmserve.server.run import bind
from vlmserve.server.web import WebServer
from vlmserve.settings.config import EngineConfig, MediaConfig, ServerConfig

TOKEN = "a token of the test"
SIZE = 2**32
"""Bytes of each model's KV cache, which are most of what it takes."""


def make_models(folder: Path, names: Sequence[str]) -> Path:
    for name in names:
        (folder / name).mkdir(parents=True)
        make_mock_checkpoint(folder / name, supports_images=False)
    return folder


def list_models(folder: Path, **engine: Any) -> list[Listed]:
    settings = {"engine": "mock", "device": "cpu", "kv_cache_memory": SIZE, **engine}
    return find_models(str(folder), EngineConfig(**settings), MediaConfig(), ServerConfig(stats_interval=0))


class Serving:
    """Use as an asynchronous context manager. room: models that fit into memory."""

    def __init__(
        self,
        listed: Sequence[Listed],
        room: int = 2,
        *,
        patience: float = 60.0,
        load_timeout: float = 600.0,
        **front: Any,
    ) -> None:
        self._listed, self._front = listed, ServerConfig(port=0, access_log=False, **front)
        self.shelf = Shelf(int((room + 0.6) * SIZE), patience)
        self._load_timeout = load_timeout
        self.started: list[ForkedMember] = []

    async def __aenter__(self) -> Serving:
        self.gateway = OnDemandGateway(self._front, TOKEN)
        connect, timeout = self.gateway.set_workers, self._load_timeout
        self.pool = Pool(self._listed, self.shelf, self.start, connect, TOKEN, load_timeout=timeout)
        self.gateway.open(self.pool)
        self._web = WebServer(create_app(self.gateway), self._front, bind(self._front))
        self._web.start()
        self.client = httpx.AsyncClient(base_url=self._web.url, timeout=120)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()
        await self.pool.close()
        await self._web.stop()
        await self.gateway.close()

    def start(self, launch: WorkerLaunch) -> ForkedMember:
        process = ForkedMember(launch, patience=10.0, in_threads=True)
        self.started.append(process)
        return process

    def model(self, name: str) -> Model:
        return self.pool.models[name]

    async def ask(self, model: str | None, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        body = {"prompt": "What is", "max_tokens": 4, **fields} if path == "/v1/completions" else fields
        return await self.client.post(path, json=body if model is None else {"model": model, **body})

    async def states(self) -> dict[str, str]:
        listed = (await self.client.get("/v1/models")).json()["data"]
        return {card["id"]: card["state"] for card in listed}
