"""Load and unload adapters on a worker at a gateway's request."""

from __future__ import annotations

import asyncio
from collections.abc import Container
from http import HTTPStatus

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from vlmserve.scaleout.changes import Change, Changes
from vlmserve.scaleout.messages import MakeChange
from vlmserve.server.body import read_body
from vlmserve.server.errors import RefusedError
from vlmserve.server.routes.adapters import load, unload
from vlmserve.server.schema.models import LoadAdapterRequest, UnloadAdapterRequest
from vlmserve.server.service import Service

_MOST_BYTES = 64 * 1024


class MadeChanges:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._changes = Changes()
        self._locks: dict[str, asyncio.Lock] = {}

    def now(self, served: Container[str]) -> tuple[Change, ...]:
        """Changes that still hold: a restarted engine may have failed to load an adapter. served: names of all
        adapters."""
        return tuple(
            change
            for change in self._changes
            if change.adapter in served or (change.part is None and change.path is None)
        )

    async def answer(self, request: Request) -> Response:
        """Raises VLMServeError."""
        service = self._service
        service.check_serving()
        with service.bodies.share() as share, service.demand.in_use():
            asked = msgspec.json.decode(await read_body(request, _MOST_BYTES, share), type=MakeChange)
            await service.wake()
            return PlainTextResponse(await self._make(asked.change, force=asked.force))

    async def _make(self, change: Change, *, force: bool) -> str:
        async with self._locks.setdefault(change.adapter, asyncio.Lock()):
            known = Changes(self.now({name for name, _ in self._service.names.adapter_infos()}))
            if not known.is_news(change):
                if change in known:
                    return "Nothing to change."
                message = f"{change.adapter!r} was changed again in the meantime"
                raise RefusedError(HTTPStatus.CONFLICT, message, "changed_meanwhile")
            said = await self._apply(change, force=force)
            self._changes.add(change)
            return said

    async def _apply(self, change: Change, *, force: bool) -> str:
        mixture = change.mixture or None
        if change.path is not None:
            body = LoadAdapterRequest(lora_name=change.name, lora_path=change.path, load_inplace=force, mixture=mixture)
            return await load(self._service, body)
        if force and self._is_unloaded(change):
            return "Nothing to change."
        return await unload(self._service, UnloadAdapterRequest(lora_name=change.name, mixture=mixture))

    def _is_unloaded(self, change: Change) -> bool:
        served = self._service.client.calls.adapters
        if change.mixture:
            return change.mixture in served and change.name not in served[change.mixture].mixes
        return change.name not in served
