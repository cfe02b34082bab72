"""A gateway to workers of this machine that start when a request names their model."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Sequence
from typing import NoReturn

from vlmserve.errors import UnavailableError, VLMServeError
from vlmserve.scaleout.gateway import Gateway
from vlmserve.scaleout.hosts import SILENCE, waiting_comment
from vlmserve.scaleout.messages import ModelFacts
from vlmserve.scaleout.ondemand.pool import Pool
from vlmserve.scaleout.router import Router
from vlmserve.scaleout.settings import GatewayConfig
from vlmserve.server.schema.base import BodyLimits
from vlmserve.settings.base import read_settings
from vlmserve.settings.config import ServerConfig
from vlmserve.storage.store import open_store

_ATTEMPTS = 2
"""Workers to try for a request: the second one after a crash."""


def keeps_batches(server: ServerConfig) -> bool:
    """Return whether the user has named a database, which the server and its models share."""
    return server.storage_path is not None or server.storage_url not in (None, "none", "memory")


class OnDemandGateway(Gateway):
    """Call `open` before requests come. token: proves to workers that requests come from here."""

    def __init__(self, server: ServerConfig, token: str) -> None:
        super().__init__(server, read_settings(GatewayConfig, {"max_attempts": _ATTEMPTS}), token)
        self.created = int(time.time())
        self.pool: Pool
        self.facts: dict[str, ModelFacts] = {}
        """Facts about each model that was loaded once, by name."""
        self.store = open_store(server) if keeps_batches(server) else None
        self.batch_news = asyncio.Event()
        self.serves_several = True
        self.body_limits = BodyLimits(server.max_body_values, server.max_messages)
        self._fixed: dict[str, str] = {}
        """Models by the names in their settings. A loaded model's other names never replace these."""
        self._learned: dict[str, str] = {}
        """Models by names that they had while loaded."""

    def open(self, pool: Pool) -> None:
        self.pool = pool
        for name, model in pool.models.items():
            for alias in model.listed.names:
                self._fixed.setdefault(alias, name)
        self._fixed |= {name: name for name in pool.models}
        self.update_models()

    @property
    def known_models(self) -> Collection[str]:
        return self.pool.models.keys()

    @property
    def preparation(self) -> NoReturn:
        """Raises UnavailableError: only loaded models read images, videos and documents."""
        raise self._nothing_loaded()

    def _nothing_loaded(self) -> UnavailableError:
        return UnavailableError("No model is loaded; a request to one loads it")

    def check_serving(self) -> None:
        if (problem := self.problem()) is not None:
            raise problem

    async def close(self) -> None:
        await super().close()
        if self.store is not None:
            await asyncio.to_thread(self.store.close)

    def problem(self) -> VLMServeError | None:
        return UnavailableError("The server is shutting down") if self.phase == "closing" else None

    def model(self, name: object) -> tuple[str, Router]:
        own = self.own_name(name)
        if own not in self.models:
            raise UnavailableError(f"{own} is not loaded; a request to it loads it")
        return own, self.models[own].router

    def any_model(self) -> tuple[str, Router]:
        own = self.pool.most_recent()
        if own is None:
            raise self._nothing_loaded()
        return self.model(own)

    async def await_worker(self, name: object, held: contextlib.ExitStack) -> None:
        """Keep the model loaded until `held` closes. Raises UnavailableError."""
        own = self._needed(name)
        if own is None:
            return
        for _ in range(_ATTEMPTS):
            held.close()
            held.callback(self.pool.leave, await self.pool.enter(own))
            if await self._responds(own):
                return
        raise UnavailableError(f"{own} does not respond; try again soon")

    async def _responds(self, own: str) -> bool:
        """Return False if the worker has ended or is silent for too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SILENCE):
                while self.pool.models[own].url is not None and not self.members_of(own):
                    await self.change_of_worker()
        return bool(self.members_of(own))

    def absent(self, name: object) -> float:
        own = self._needed(name)
        return 0.0 if own is None or self.members_of(own) else SILENCE

    def unloaded_model(self, name: object) -> str | None:
        own = self._needed(name)
        return own if own is not None and not self.members_of(own) else None

    def adapters_of_unloaded(self, own: str) -> Sequence[str]:
        return self.adapters.of_unloaded_model(own, self.pool.models[own].listed.adapters)

    def waiting_comment(self, name: object) -> bytes | None:
        """The state of the request's model; None while it is loaded."""
        model = self.pool.models.get(self._names.get(name, "") if isinstance(name, str) else "")
        if model is None or model.state == "loaded":
            return None
        return waiting_comment(model.listed.name, is_loading=model.state == "loading", progress=model.progress)

    def update_models(self) -> None:
        super().update_models()
        self._learned |= self._names
        self._names = self._learned | self._fixed
        self.facts |= {name: model.facts for name, model in self.models.items()}

    def _needed(self, name: object) -> str | None:
        """None: unknown. Requests without a name take any loaded model."""
        if isinstance(name, str):
            return self._names.get(name)
        models = self.pool.models
        return next(iter(models)) if len(models) == 1 else self.pool.most_recent()
