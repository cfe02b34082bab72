"""Load and unload adapters through a gateway, on all workers of a model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from vlmserve.errors import UnavailableError, UnknownModelError
from vlmserve.scaleout.converge import Outcome, ask
from vlmserve.scaleout.gateway import Gateway
from vlmserve.server.body import read_json_body
from vlmserve.server.connection import note_error, request_id_of
from vlmserve.server.errors import RefusedError, error_body, json_response
from vlmserve.server.routes.adapters import check_admin
from vlmserve.server.schema.base import BodyLimits, parse_body
from vlmserve.server.schema.models import LoadAdapterRequest, UnloadAdapterRequest


async def load_adapter(request: Request) -> Response:
    """Have all workers of a model load or replace a LoRA adapter from their folders. Load the model if needed."""
    return await _change(request, LoadAdapterRequest)


async def unload_adapter(request: Request) -> Response:
    """Have all workers of a model unload a LoRA adapter."""
    return await _change(request, UnloadAdapterRequest)


async def _change(request: Request, kind: type[LoadAdapterRequest] | type[UnloadAdapterRequest]) -> Response:
    gateway: Gateway = request.app.state.gateway
    check_admin(request)
    config = gateway.config
    with gateway.bodies.share() as share:
        data = await read_json_body(request, gateway.max_body_bytes, share, config.body_timeout)
        body = parse_body(kind, data, BodyLimits(config.max_body_values, config.max_messages))
    if isinstance(body, UnloadAdapterRequest) and (unloaded := gateway.unloaded_model(body.model)) is not None:
        return _unload_later(gateway, unloaded, body)
    with contextlib.ExitStack() as held:
        await gateway.await_worker(body.model, held)
        own, _ = gateway.model(body.model)
        return await _change_all(request, own, body)


def _unload_later(gateway: Gateway, own: str, body: UnloadAdapterRequest) -> Response:
    """Let a model that no worker has loaded lack the adapter once it is loaded."""
    name = body.mixture or body.lora_name
    if name not in gateway.adapters_of_unloaded(own):
        raise UnknownModelError(f"there is no adapter {name!r:.100} here", param="lora_name")
    gateway.learn(own, gateway.adapters.new(own, body.lora_name, None, body.mixture))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def _change_all(request: Request, own: str, body: LoadAdapterRequest | UnloadAdapterRequest) -> Response:
    gateway: Gateway = request.app.state.gateway
    members = gateway.members_of(own)
    if not members:
        raise UnavailableError(f"No worker of {own!r} answers now; try again soon")
    path, force = (body.lora_path, body.load_inplace) if isinstance(body, LoadAdapterRequest) else (None, False)
    change = gateway.adapters.new(own, body.lora_name, path, body.mixture)
    headers = [("x-request-id", request_id_of(request))]
    with gateway.adapters.asking(change):
        outcomes = await asyncio.gather(*(ask(member, change, force=force, headers=headers) for member in members))
    done = [member for member, one in zip(members, outcomes, strict=True) if one.status == HTTPStatus.OK]
    if done:
        gateway.learn(own, change)
        await gateway.adapters.made(done, change)
    failed = [one for one in outcomes if one.status != HTTPStatus.OK]
    if path is None and done:
        failed = [one for one in failed if one.status != HTTPStatus.NOT_FOUND]  # already absent there
    if not failed:
        return PlainTextResponse(next(one.said for one in outcomes if one.status == HTTPStatus.OK))
    error = _error(failed, len(outcomes))
    note_error(request.scope, error.code, str(error))
    report = {one.worker: "ok" if one not in failed else one.said for one in outcomes}
    return json_response({**error_body(error), "workers": report}, error.status)


def _error(failed: Sequence[Outcome], count: int) -> RefusedError:
    """502, or the status that all failures have in common."""
    statuses = {one.status for one in failed}
    status = HTTPStatus(statuses.pop()) if len(statuses) == 1 else HTTPStatus.BAD_GATEWAY
    reasons = "; ".join(f"{one.worker}: {one.said}" for one in failed)
    message = f"{len(failed)} of {count} workers failed: {reasons}"
    return RefusedError(status, message, "workers_failed")
