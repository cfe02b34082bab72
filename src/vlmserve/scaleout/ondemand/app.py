"""The application of a server with models that load on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import msgspec
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from vlmserve.scaleout.app import app_of
from vlmserve.scaleout.metrics import exposition
from vlmserve.scaleout.ondemand.gateway import OnDemandGateway
from vlmserve.scaleout.ondemand.pool import Model, Pool
from vlmserve.scaleout.proxy import forward
from vlmserve.server.app import operations
from vlmserve.server.errors import json_response
from vlmserve.server.openapi import routes
from vlmserve.server.routes.files import upload_file
from vlmserve.server.routes.models import is_for_anthropic
from vlmserve.server.routes.ollama import local_model, ollama_version
from vlmserve.server.schema.cards import ModelCard, model_card, model_list
from vlmserve.server.schema.ollama import LocalModels


def create_app(gateway: OnDemandGateway) -> Starlette:
    own = {
        "/v1/models": list_models,
        "/v1/models/{name:path}": show_model,
        "/api/tags": list_for_ollama,
        "/api/ps": list_loaded_for_ollama,
        "/api/version": ollama_version,
        "/metrics": show_metrics,
    }
    offered = operations(gateway.config)
    kept = [one for one in offered if one.path.startswith(_STORED)] if gateway.store is not None else []
    answered = [replace(one, endpoint=upload) if one.endpoint is upload_file else one for one in kept]
    app = app_of(gateway, own, [one for one in offered if one not in kept], routes(answered))
    app.state.service = gateway
    return app


_STORED = ("/v1/batches", "/v1/files")
"""Paths that the server itself answers if it has a database."""


def _gateway(request: Request) -> OnDemandGateway:
    gateway: OnDemandGateway = request.app.state.gateway
    return gateway


def _cards(request: Request) -> Iterator[ModelCard]:
    """Entries of all models with their state, and of their adapters."""
    gateway, for_anthropic = _gateway(request), is_for_anthropic(request)
    for name, model in gateway.pool.models.items():
        facts = gateway.facts.get(name)
        abilities = None if facts is None else facts.abilities
        for alias in model.listed.shown:
            card = model_card(alias, gateway.created, abilities, for_anthropic=for_anthropic)
            card.state, card.reason = model.state, model.failure or msgspec.UNSET
            yield card
        loaded = gateway.models[name].adapters if name in gateway.models else None
        for adapter in gateway.adapters_of_unloaded(name) if loaded is None else loaded:
            card = model_card(adapter, gateway.created, abilities, for_anthropic=for_anthropic)
            root = None if loaded is None else loaded[adapter].root
            card.parent, card.root, card.state = name, root or msgspec.UNSET, model.state
            yield card


async def upload(request: Request) -> Response:
    """Store a file. Without a loaded model, only requests of a batch are stored."""
    is_loaded = _gateway(request).pool.most_recent() is not None
    return await forward(request) if is_loaded else await upload_file(request)


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
    gateway = _gateway(request)
    return _local_models(gateway, gateway.pool.models)


async def list_loaded_for_ollama(request: Request) -> Response:
    """List the loaded models in the form of Ollama's API."""
    gateway = _gateway(request)
    return _local_models(gateway, [name for name, model in gateway.pool.models.items() if model.state == "loaded"])


def _local_models(gateway: OnDemandGateway, names: Iterable[str]) -> Response:
    known = {name: facts.abilities for name, facts in gateway.facts.items()}
    return json_response(LocalModels([local_model(name, gateway.created, known.get(name)) for name in names]))


async def show_metrics(request: Request) -> Response:
    """The metrics of the server and of all loaded models, labeled with their names."""
    gateway = _gateway(request)
    page = pool_metrics(gateway.pool) + await exposition(gateway.metrics, gateway.heard)
    return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")


def pool_metrics(pool: Pool) -> str:
    registry = CollectorRegistry()
    registry.register(_Models(pool))
    return generate_latest(registry).decode()


class _Models(Collector):
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        for kind, name, text, value in _METRICS:
            family = kind(f"vlmserve:model_{name}", text, labels=["model"])
            for model in self._pool.models.values():
                family.add_metric([model.listed.name], value(model))
            yield family


_METRICS: tuple[tuple[type[GaugeMetricFamily | CounterMetricFamily], str, str, Callable[[Model], float]], ...] = (
    (GaugeMetricFamily, "loaded", "1 if the model is loaded.", lambda model: model.state == "loaded"),
    (GaugeMetricFamily, "bytes", "Memory reserved for the model; 0 if unloaded.", lambda model: model.reserved_bytes),
    (GaugeMetricFamily, "waiting", "Requests that wait for the model to load.", lambda model: len(model.waiting)),
    (CounterMetricFamily, "loads", "Loads of the model.", lambda model: model.loads),
    (CounterMetricFamily, "load_seconds", "Seconds of all loads of the model.", lambda model: model.load_seconds),
    (CounterMetricFamily, "load_failures", "Failed loads of the model.", lambda model: model.failed_loads),
    (CounterMetricFamily, "crashes", "Crashes of the model's processes.", lambda model: model.crashes),
)
