"""The application of a server with models that load on demand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from vlmserve.scaleout.adapters import load_adapter, unload_adapter
from vlmserve.scaleout.app import Endpoint, app_of, health, ready, show_live
from vlmserve.scaleout.metrics import exposition
from vlmserve.scaleout.ondemand.gateway import OnDemandGateway
from vlmserve.scaleout.ondemand.metrics import pool_metrics
from vlmserve.server.app import operations, show_version
from vlmserve.server.errors import json_response
from vlmserve.server.routes.models import is_for_anthropic
from vlmserve.server.routes.ollama import local_model, ollama_version
from vlmserve.server.schema.cards import ModelCard, model_card, model_list
from vlmserve.server.schema.ollama import LocalModels


def create_app(gateway: OnDemandGateway) -> Starlette:
    own: dict[str, Endpoint] = {
        "/v1/models": list_models,
        "/v1/models/{name:path}": show_model,
        "/v1/load_lora_adapter": load_adapter,
        "/v1/unload_lora_adapter": unload_adapter,
        "/api/tags": list_for_ollama,
        "/api/ps": list_loaded_for_ollama,
        "/api/version": ollama_version,
        "/health": health,
        "/ping": health,
        "/ready": ready,
        "/version": show_version,
        "/metrics": show_metrics,
        "/live": show_live,
    }
    return app_of(gateway, own, operations(gateway.config))


def _gateway(request: Request) -> OnDemandGateway:
    gateway: OnDemandGateway = request.app.state.gateway
    return gateway


def _cards(request: Request) -> Iterator[ModelCard]:
    """Entries of all models with their state, and of loaded models' adapters."""
    gateway, for_anthropic = _gateway(request), is_for_anthropic(request)
    for name, model in gateway.pool.models.items():
        facts = gateway.facts.get(name)
        abilities = None if facts is None else facts.abilities
        for alias in (name, *(one for one in model.listed.server.served_model_name if one != name)):
            card = model_card(alias, gateway.created, abilities, for_anthropic=for_anthropic)
            card.state, card.reason = model.state, model.failure or msgspec.UNSET
            yield card
        for adapter, about in gateway.models[name].adapters.items() if name in gateway.models else ():
            card = model_card(adapter, gateway.created, abilities, for_anthropic=for_anthropic)
            card.parent, card.root, card.state = name, about.root or msgspec.UNSET, model.state
            yield card


async def list_models(request: Request) -> Response:
    """List all models with their state."""
    return json_response(model_list(list(_cards(request))))


async def show_model(request: Request) -> Response:
    """Show one model by name."""
    name = request.path_params["name"]
    own = _gateway(request).own_name(name)
    cards = {card.id: card for card in _cards(request)}
    return json_response(cards.get(name) or cards[own])


async def list_for_ollama(request: Request) -> Response:
    """List all models in the form of Ollama's API."""
    return _local_models(_gateway(request), _gateway(request).pool.models)


async def list_loaded_for_ollama(request: Request) -> Response:
    """List the loaded models in the form of Ollama's API."""
    models = _gateway(request).pool.models
    return _local_models(_gateway(request), [name for name, model in models.items() if model.state == "loaded"])


def _local_models(gateway: OnDemandGateway, names: Iterable[str]) -> Response:
    facts = gateway.facts
    abilities = {name: facts[name].abilities if name in facts else None for name in names}
    return json_response(LocalModels([local_model(name, gateway.created, abilities[name]) for name in names]))


async def show_metrics(request: Request) -> Response:
    """The metrics of the server and of all loaded models, labeled with their names."""
    gateway = _gateway(request)
    page = pool_metrics(gateway.pool) + await exposition(gateway.metrics, gateway.heard)
    return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")
