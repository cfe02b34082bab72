"""Ray Serve deployments of workers and gateways.

`serve deploy` imports `workers` and `gateways` by path; see `deploy/ray/serve.yaml`.
"""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import ray
from ray import serve
from ray.serve._private import replica as serve_replica
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from vlmserve.engine.preload import fork_children_from
from vlmserve.errors import VLMServeError
from vlmserve.scaleout.member_messages import GatewayLaunch, Launch, WorkerLaunch
from vlmserve.scaleout.messages import LOAD_PATH, TOKEN_HEADER, Load
from vlmserve.scaleout.ray.directory import Kind
from vlmserve.scaleout.ray.membership import Membership
from vlmserve.scaleout.scaling import workers_wanted
from vlmserve.scaleout.settings import GatewayConfig
from vlmserve.scaleout.storage import check_shared, refuse_local
from vlmserve.settings.base import Settings, check_names, read_settings
from vlmserve.settings.config import EngineConfig, MediaConfig, ServerConfig

_EXTRA_GRACE = 10.0
"""Seconds for a process to end after its requests."""
_REPLACED = 60.0
"""Seconds for Serve to stop a gateway after another one took over."""
_WATCHED: Mapping[str, Any] = {
    "max_ongoing_requests": 100,
    "health_check_period_s": 1.0,
    "logging_config": {"log_level": "WARNING", "enable_access_log": False},
}
"""Only Serve's own calls pass through Ray."""
_OF_WORKERS = ("name", "count", "most", "max_surge_percent", "resources")
_QUEUED, _USAGE = "queued_seconds", "usage"


def worker_launch(name: str, token: str, engine: str, media: str, server: str) -> WorkerLaunch:
    """Settings from sections as JSON."""
    inner = own_server(ServerConfig.model_validate_json(server))
    return WorkerLaunch(name, token, engine, media, inner.model_dump_json())


def own_server(server: ServerConfig) -> ServerConfig:
    """A worker's settings: the machine's address, and no API keys, because gateways check keys and limits."""
    own = {"host": str(ray.util.get_node_ip_address()), "port": 0, "enable_page": False, "access_log": False}
    return server.model_copy(update={**own, "api_key": (), "api_keys_file": None})


def _keep_to_own_address() -> None:
    """Have Serve's port for calls between replicas listen only at the node's address.

    Serve listens at all addresses and has no setting for it. The port opens later.
    """
    add_port = serve_replica.add_port_to_grpc_server
    own = str(ray.util.get_node_ip_address())
    serve_replica.add_port_to_grpc_server = lambda server, address: add_port(server, address.replace("[::]", own))


class _Replica:
    """Owns one process. Requests go directly to it. preloader: forks the process; empty: it imports all itself."""

    def __init__(
        self, kind: Kind, launch: Callable[[str, str], Launch], prefix: str, grace: float, preloader: str
    ) -> None:
        fork_children_from(preloader)
        self.membership = Membership(kind, launch, prefix)
        _keep_to_own_address()
        self._grace = grace

    def check_health(self) -> None:
        if not self.membership.is_alive:
            raise VLMServeError(f"the process at {self.membership.url} has ended")

    async def __call__(self) -> str:
        return self.membership.url

    async def __del__(self) -> None:
        await asyncio.to_thread(self.membership.drain, self._grace)


class WorkerReplica(_Replica):
    """engine, media, server: settings as JSON. name: prefix of the deployment's workers."""

    def __init__(self, name: str, engine: str, media: str, server: str, grace: float, preloader: str) -> None:
        self._capacity = EngineConfig.model_validate_json(engine).max_num_seqs
        self._token = ""

        def launch(token: str, own_name: str) -> WorkerLaunch:
            self._token = token
            return worker_launch(own_name, token, engine, media, server)

        super().__init__("worker", launch, name, grace, preloader)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        load = await asyncio.to_thread(self._load)
        return {_QUEUED: load.queued_seconds, _USAGE: load.running / self._capacity}

    def _load(self) -> Load:
        request = urllib.request.Request(self.membership.url + LOAD_PATH, headers={TOKEN_HEADER: self._token})
        with urllib.request.urlopen(request, timeout=5) as answer:
            return msgspec.json.decode(answer.read(), type=Load)


class GatewayReplica(_Replica):
    """In an update it takes its port over from the old replica."""

    def __init__(self, server: str, gateway: str, grace: float, preloader: str) -> None:
        super().__init__("gateway", lambda token, _: GatewayLaunch(token, server, gateway, True), "", grace, preloader)
        self._replaced_at: float | None = None

    def check_health(self) -> None:
        if self.membership.was_replaced:
            # Serve is about to stop this replica, which has no process. Fail if it does not.
            self._replaced_at = self._replaced_at or time.monotonic()
            if time.monotonic() - self._replaced_at < _REPLACED:
                return
        super().check_health()


def scale(context: AutoscalingContext, most_seconds: float = 2.0) -> tuple[int, dict[str, Any]]:
    """Autoscaling policy for Serve; see `workers_wanted`."""
    metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
    queued, usage = metrics.get(_QUEUED, {}), metrics.get(_USAGE, {})
    wanted = workers_wanted(list(queued.values()), list(usage.values()), most_seconds) if queued else (
        context.target_num_replicas
    )  # fmt: skip
    least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return max(least, min(most, wanted)), {}


def worker_application(
    name: str,
    engine: EngineConfig,
    media: MediaConfig,
    server: ServerConfig,
    *,
    count: int = 1,
    most: int | None = None,
    max_surge_percent: int = 0,
    resources: Mapping[str, float] | None = None,
    preloader: str = "",
) -> serve.Application:
    """Make `count` workers, or up to `most` under load.

    max_surge_percent: extra workers during updates. resources: Ray resources of a worker, like ``{"num_cpus": 4,
    "num_gpus": 1}``. preloader: address of this machine's preloader.
    """
    grace = server.shutdown_grace + _EXTRA_GRACE
    options: dict[str, Any] = {
        "ray_actor_options": _set_aside(resources),
        "max_surge_percent": max_surge_percent,
        "graceful_shutdown_timeout_s": grace + _EXTRA_GRACE,
    }
    if most is None:
        options["num_replicas"] = count
    else:
        policy = AutoscalingPolicy(policy_function="vlmserve.scaleout.ray.deployments:scale")
        options["autoscaling_config"] = AutoscalingConfig(min_replicas=count, max_replicas=most, policy=policy)
    worker: Any = serve.deployment(WorkerReplica, name="worker", **_WATCHED, **options)
    sections = engine.model_dump_json(), media.model_dump_json(), server.model_dump_json()
    return worker.bind(name, *sections, grace, preloader)


def gateway_application(
    server: ServerConfig,
    gateway: GatewayConfig,
    *,
    count: int = 1,
    resources: Mapping[str, float] | None = None,
    preloader: str = "",
) -> serve.Application:
    """Each gateway needs its own machine. An update of a single one may stay on its machine."""
    grace = server.shutdown_grace + _EXTRA_GRACE
    replica: Any = serve.deployment(
        GatewayReplica,
        name="gateway",
        **_WATCHED,
        num_replicas=count,
        max_replicas_per_node=1 if server.port and count > 1 else None,
        max_surge_percent=100 if count == 1 else 0,  # with one on each machine there is no room for another
        ray_actor_options=_set_aside(resources),
        graceful_shutdown_timeout_s=grace + _EXTRA_GRACE,
    )
    return replica.bind(server.model_dump_json(), gateway.model_dump_json(), grace, preloader)


def workers(args: dict[str, Any]) -> serve.Application:
    """Entry point for `serve deploy`. args: of `worker_application`, and server settings by name."""
    own = {name: args.pop(name) for name in _OF_WORKERS if name in args}
    kinds = (EngineConfig, MediaConfig, ServerConfig)
    check_names(args, kinds)
    engine, media, server = (_of(kind, args) for kind in kinds)
    assert isinstance(engine, EngineConfig)
    assert isinstance(media, MediaConfig)
    assert isinstance(server, ServerConfig)
    return worker_application(own.pop("name", "worker"), engine, media, check_shared(server), **own)


def gateways(args: dict[str, Any]) -> serve.Application:
    """Entry point for `serve deploy`. args: `count`, `resources`, and settings of server and gateway by name."""
    own = {name: args.pop(name) for name in ("count", "resources") if name in args}
    check_names(args, (ServerConfig, GatewayConfig))
    server, gateway = _of(ServerConfig, args), _of(GatewayConfig, args)
    assert isinstance(server, ServerConfig)
    assert isinstance(gateway, GatewayConfig)
    refuse_local(server)
    return gateway_application(server, gateway, **own)


def _set_aside(resources: Mapping[str, float] | None) -> dict[str, Any]:
    wanted = {"num_cpus": 1.0, **(resources or {})}
    own: dict[str, Any] = {name: wanted.pop(name) for name in ("num_cpus", "num_gpus", "memory") if name in wanted}
    return {**own, "resources": wanted}


def _of(kind: type[Settings], args: Mapping[str, Any]) -> Settings:
    return read_settings(kind, {name: value for name, value in args.items() if name in kind.model_fields})
