"""``/v1/models``: the model and its adapters."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from vlmserve.server.errors import json_response
from vlmserve.server.schema.cards import ModelCard, model_card, model_list
from vlmserve.server.service import Service


def is_for_anthropic(request: Request) -> bool:
    """Return whether an Anthropic client asks: both APIs share ``/v1/models``."""
    return "anthropic-version" in request.headers


def _card(request: Request, name: str) -> ModelCard:
    service: Service = request.app.state.service
    return model_card(name, service.created, service.abilities, for_anthropic=is_for_anthropic(request))


def _adapter_cards(request: Request) -> Iterator[ModelCard]:
    service: Service = request.app.state.service
    for name, info in service.names.adapter_infos():
        card = _card(request, name)
        card.parent = service.model_name
        card.root = msgspec.UNSET if info is None else info.digest
        card.mixes = info.mixes if info is not None and info.mixes else msgspec.UNSET
        yield card


async def list_models(request: Request) -> Response:
    """List the model under each of its names, and its adapters."""
    service: Service = request.app.state.service
    own = [_card(request, name) for name in service.names.own]
    return json_response(model_list([*own, *_adapter_cards(request)]))


async def show_model(request: Request, name: str) -> Response:
    """Describe one model or adapter."""
    service: Service = request.app.state.service
    service.names.check(name)
    if not service.names.is_own(name):
        own = service.names.untagged(name)
        return json_response(next(card for card in _adapter_cards(request) if card.id == own))
    return json_response(_card(request, name if name in service.names.own else service.model_name))
