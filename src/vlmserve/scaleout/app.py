"""The gateway's application: it serves all paths of a server, and forwards most of them."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vlmserve.errors import UnknownModelError
from vlmserve.scaleout.adapters import load_adapter, unload_adapter
from vlmserve.scaleout.gateway import Gateway
from vlmserve.scaleout.live import ClusterView
from vlmserve.scaleout.metrics import exposition
from vlmserve.scaleout.proxy import forward
from vlmserve.server.app import assemble, operations, show_version
from vlmserve.server.errors import json_response, retry_after
from vlmserve.server.openapi import Operation
from vlmserve.server.paths import OLLAMA
from vlmserve.server.routes.models import is_for_anthropic
from vlmserve.server.schema.cards import ModelCard, model_card, model_list
from vlmserve.server.schema.models import Health

Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(gateway: Gateway) -> Starlette:
    own = {"/v1/models": list_models, "/v1/models/{name:path}": show_model, "/metrics": show_metrics}
    offered = [one for one in operations(gateway.config) if not one.path.startswith(OLLAMA)]
    return app_of(gateway, own, offered)


def app_of(
    gateway: Gateway, own: Mapping[str, Endpoint], offered: Iterable[Operation], more: Iterable[Route] = ()
) -> Starlette:
    """own: endpoints by path that answer here, besides the ones of all gateways. more: routes, also answered here."""
    own = {
        "/v1/load_lora_adapter": load_adapter,
        "/v1/unload_lora_adapter": unload_adapter,
        "/health": health,
        "/ping": health,
        "/ready": ready,
        "/version": show_version,
        "/live": show_live,
        **own,
    }
    served = [Route(one.path, own.get(one.path, forward), methods=[one.method]) for one in offered]
    served += more
    app = assemble(gateway, served)
    app.state.gateway = gateway
    app.state.view = ClusterView(gateway)
    return app


def _cards(request: Request) -> list[ModelCard]:
    gateway: Gateway = request.app.state.gateway
    card_of = functools.partial(model_card, for_anthropic=is_for_anthropic(request))
    cards = []
    offered = gateway.hosts.models
    for own, model in gateway.models.items():
        facts = model.facts
        named = [card_of(name, facts.created, facts.abilities) for name in facts.names]
        for card in named if offered else ():
            card.state = "loaded" if own not in offered or gateway.members_of(own) else offered[own].state
        cards += named
        for name, adapter in model.adapters.items():
            card = card_of(name, facts.created, facts.abilities)
            card.parent = facts.names[0]
            card.root = adapter.root or msgspec.UNSET
            card.mixes = list(adapter.mixes) or msgspec.UNSET
            cards.append(card)
    return [*cards, *_cards_of_unloaded(gateway, card_of)]


def _cards_of_unloaded(gateway: Gateway, card_of: Callable[..., ModelCard]) -> Iterator[ModelCard]:
    """Entries of models that workers could load, and of their adapters."""
    hosts = gateway.hosts
    for own, offered in hosts.models.items():
        if own not in gateway.models:
            facts = hosts.facts.get(own)
            for name in offered.shown or (own,):
                card = card_of(name, hosts.created, None if facts is None else facts.abilities)
                card.state, card.reason = offered.state, offered.reason or msgspec.UNSET
                yield card
            for name in gateway.adapters_of_unloaded(own):
                card = card_of(name, hosts.created, None if facts is None else facts.abilities)
                card.parent, card.state = own, offered.state
                yield card


async def list_models(request: Request) -> Response:
    """List the models of all workers, under each of their names."""
    return json_response(model_list(_cards(request)))


async def show_model(request: Request) -> Response:
    """Show one model by name."""
    gateway: Gateway = request.app.state.gateway
    name = request.path_params["name"]
    own = gateway.own_name(name)
    cards = {card.id: card for card in _cards(request)}
    if (card := cards.get(name, cards.get(own))) is None:
        raise UnknownModelError(f"There is no model {name!r:.100} here", param="model")
    return json_response(card)


async def health(request: Request) -> Response:
    """Liveness: always 200, whatever the workers do."""
    return json_response(Health("ok"))


async def ready(request: Request) -> Response:
    """Readiness: 200 while some worker answers, else 503 with the reason."""
    gateway: Gateway = request.app.state.gateway
    problem = gateway.problem()
    if problem is None:
        return json_response(Health("ok"))
    state = Health("closing" if gateway.phase == "closing" else "loading", str(problem))
    return json_response(state, 503, {"Retry-After": retry_after(problem)})


async def show_metrics(request: Request) -> Response:
    """The metrics of the gateway and of all workers, labeled with their names."""
    gateway: Gateway = request.app.state.gateway
    page = await exposition(gateway.metrics, [*gateway.heard, *gateway.hosts.heard])
    return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")


async def show_live(request: Request) -> Response:
    """Live statistics of all engines together and of each worker."""
    view: ClusterView = request.app.state.view
    return json_response(await view.stats())
