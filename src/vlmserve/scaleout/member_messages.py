"""Messages between the process of a worker or gateway and its parent, lines of JSON."""

from __future__ import annotations

import msgspec

HANDED_OVER = 10
"""Exit status of a gateway after another one took over."""


class WorkerLaunch(msgspec.Struct, frozen=True, tag="worker"):
    """Settings of a worker, each section as JSON."""

    name: str
    """Kept across restarts."""
    token: str
    """Shared by the cluster."""
    engine: str
    media: str
    server: str


class ModelLaunch(msgspec.Struct, frozen=True):
    """Settings of a model that loads on demand, each section as JSON."""

    name: str
    engine: str
    media: str
    server: str


class HostLaunch(msgspec.Struct, frozen=True, tag="host"):
    """Settings of a worker of several models. server: where it listens. models: `ModelsConfig`."""

    name: str
    token: str
    listed: list[ModelLaunch]
    server: str
    models: str


class GatewayLaunch(msgspec.Struct, frozen=True, tag="gateway"):
    token: str
    server: str
    gateway: str
    takes_over: bool = False
    """Replace a gateway of the same cluster at its port."""


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    progress: str


class Up(msgspec.Struct, frozen=True, tag="up"):
    """The member answers at this URL. engine: the process id of a worker's engine."""

    url: str
    engine: int | None = None


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    message: str
    kind: str
    """The error's class name."""


Launch = WorkerLaunch | HostLaunch | GatewayLaunch
News = Loading | Up | Failed
