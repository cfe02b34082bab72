"""Adapters behind a gateway: all workers of a model load and unload them, and each says how that went."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from http import HTTPStatus
from typing import NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from vlmserve.errors import UnavailableError
from vlmserve.scaleout.gateway import Gateway, Member
from vlmserve.scaleout.upstream import UpstreamError
from vlmserve.server.body import read_json_body
from vlmserve.server.connection import note_error, request_id_of
from vlmserve.server.errors import RefusedError, error_body, json_response
from vlmserve.server.routes.adapters import check_admin
from vlmserve.server.schema.base import BodyLimits, parse_body
from vlmserve.server.schema.models import LoadAdapterRequest, UnloadAdapterRequest

_TIMEOUT = 600.0
"""Seconds in which a worker reads an adapter's files."""
_HEARD = 3.0
"""Seconds for which an answer waits until this gateway knows that all workers have what they have loaded."""


class Outcome(NamedTuple):
    """What a worker said. worker: its name. said: the text of its answer, or why there is none."""

    worker: str
    status: int
    said: str


async def load_adapter(request: Request) -> Response:
    """Have all workers of a model load a LoRA adapter out of their folders, or replace one."""
    return await _change(request, LoadAdapterRequest)


async def unload_adapter(request: Request) -> Response:
    """Have all workers of a model serve a LoRA adapter no more."""
    return await _change(request, UnloadAdapterRequest)


async def _change(request: Request, kind: type[LoadAdapterRequest] | type[UnloadAdapterRequest]) -> Response:
    gateway: Gateway = request.app.state.gateway
    check_admin(request)
    config = gateway.config
    with gateway.bodies.share() as share:
        data = await read_json_body(request, gateway.max_body_bytes, share, config.body_timeout)
        body = parse_body(kind, data, BodyLimits(config.max_body_values, config.max_messages))
        own, _ = gateway.model(body.model)
        members = gateway.members_of(own)
        if not members:
            raise UnavailableError(f"No worker of {own!r} answers now; try again soon")
        outcomes = await asyncio.gather(*(_ask(member, request, data) for member in members))
    done = [member for member, one in zip(members, outcomes, strict=True) if one.status == HTTPStatus.OK]
    if isinstance(body, LoadAdapterRequest) and body.mixture is None:
        await gateway.hear_adapter(done, body.lora_name, _HEARD)
    if len(done) == len(members):
        return PlainTextResponse(outcomes[0].said)
    error = _failed(outcomes)
    note_error(request.scope, error.code)
    report = {one.worker: "ok" if one.status == HTTPStatus.OK else one.said for one in outcomes}
    return json_response({**error_body(error), "workers": report}, error.status)


async def _ask(member: Member, request: Request, body: bytes | bytearray) -> Outcome:
    assert member.hello is not None
    name = member.hello.info.name
    headers = [("content-type", "application/json"), ("x-request-id", request_id_of(request))]
    try:
        asking = member.upstream.request("POST", request.scope["path"], headers, body)
        async with asyncio.timeout(_TIMEOUT), asking as answer:
            said = b""
            while data := await answer.read():
                said += data
    except UpstreamError as error:
        return Outcome(name, HTTPStatus.BAD_GATEWAY, f"it does not answer: {error}")
    except TimeoutError:
        return Outcome(name, HTTPStatus.BAD_GATEWAY, f"it does not answer within {_TIMEOUT:.0f} s")
    return Outcome(name, answer.status, said.decode() if answer.status == HTTPStatus.OK else _message(said))


def _message(body: bytes) -> str:
    """What a worker's error says."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body.decode(errors="replace")


def _failed(outcomes: Sequence[Outcome]) -> RefusedError:
    """The error for what not all workers have done: of the status that they agree on, else 502."""
    failed = [one for one in outcomes if one.status != HTTPStatus.OK]
    statuses = {one.status for one in failed}
    status = HTTPStatus(statuses.pop()) if len(statuses) == 1 else HTTPStatus.BAD_GATEWAY
    reasons = "; ".join(f"{one.worker}: {one.said}" for one in failed)
    message = f"{len(failed)} of {len(outcomes)} workers did not do it, the others did: {reasons}"
    return RefusedError(status, message, "workers_failed")
