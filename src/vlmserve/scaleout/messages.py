from __future__ import annotations

from typing import Any

import msgspec

from vlmserve.scaleout.changes import Change
from vlmserve.server.schema.cards import Abilities


class WorkerInfo(msgspec.Struct, frozen=True):
    id: str
    """Unique; changes with every start of the process."""
    name: str
    """For people; kept across restarts."""
    url: str
    models: tuple[str, ...]
    """Names that requests may use."""
    epoch: str = ""
    """Changes whenever the engine starts with empty caches."""
    capacity: int = 256
    """Maximum concurrent requests."""
    cache_tokens: int = 1 << 20
    """Size of the KV cache in tokens."""
    draining: bool = False
    """Takes no new requests."""


class Load(msgspec.Struct, frozen=True):
    epoch: str = ""
    running: int = 0
    queued_seconds: float = 0.0
    """Prefill seconds of accepted requests without a first token, images included."""
    token_seconds: float | None = None
    """Prefill seconds of an uncached token; None: not measured yet."""
    image_seconds: float | None = None
    """Encoding seconds of an uncached image; None: not measured yet."""
    idle_seconds: float = 0.0
    """Seconds since the latest request ended; 0 while requests run."""


class Feedback(msgspec.Struct, frozen=True):
    """A worker's report at the first and the last item of an answer."""

    load: Load
    prompt_tokens: int = 0
    cached_tokens: int = 0
    images: int = 0
    images_encoded: int = 0
    completion_tokens: int = 0
    response_id: str | None = None
    """The id that later requests may continue."""


FEED_PATH = "/cluster/feed"
"""A worker's endless answer to a gateway, with one message on each line."""
LOAD_PATH = "/cluster/load"
"""A worker's load, for autoscalers. `queued_seconds` is the mean since the previous request."""
LOST_PATH = "/cluster/lost"
"""A gateway posts a response here that another worker began and cannot finish."""
ADAPTERS_PATH = "/cluster/adapters"
"""A gateway posts a change of an adapter here."""
MODELS_PATH = "/cluster/models"
"""A gateway posts the name of a model here. The answer begins when the model is loaded. The model stays loaded until
the gateway closes the answer."""
TOKEN_HEADER = "x-vlmserve-cluster"
"""The cluster's token."""
ROUTE_HEADER = "x-vlmserve-route"
"""The gateway's id and its number of the request, joined by a dot."""
PROMPT_HEADER = "x-vlmserve-prompt"
"""The gateway's hexadecimal digests of the prompt's last segment and its images, joined by commas."""
OWNER_HEADER, TENANT_HEADER, SEED_HEADER = "x-vlmserve-owner", "x-vlmserve-tenant", "x-vlmserve-seed"
BACKGROUND_HEADER = "x-vlmserve-background"
"""Marks requests of batches."""
CLIENT_HEADER = "x-vlmserve-client"
"""The IP address of the client."""


class LostResponse(msgspec.Struct, frozen=True):
    request: msgspec.Raw
    """The body, as the client sent it."""
    response: dict[str, Any]
    """From its first event, with the final status and error."""


class AdapterFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    root: str | None = None
    """The digest of its content; None before it is loaded."""
    mixes: tuple[str, ...] = ()
    """The adapters that X-LoRA mixes."""


class ModelFacts(msgspec.Struct, frozen=True):
    names: tuple[str, ...]
    """The first is the model's own."""
    created: int
    abilities: Abilities | None
    """None while the model loads."""
    adapters: dict[str, AdapterFacts] = {}
    changes: tuple[Change, ...] = ()
    """Changes of adapters that the worker has made while the cluster runs."""


class MakeChange(msgspec.Struct, frozen=True):
    change: Change
    force: bool
    """Even if another adapter has its name."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message of a feed, repeated whenever a field changes."""

    info: WorkerInfo
    facts: ModelFacts


class OfferedModel(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model that a worker of several models has loaded, or could load."""

    name: str
    names: tuple[str, ...]
    """All names that requests may use."""
    state: str
    """ "unloaded", "loading", "loaded", "unloading" or "failed"."""
    size: int = 0
    """Bytes that it takes, or is expected to take; 0: not known yet."""
    url: str = ""
    """The address of its process, which is a worker; empty unless it is loaded."""
    draining: bool = False
    """Takes no new requests, because another model needs its memory."""
    users: int = 0
    """Requests that use it or wait for it."""
    idle_seconds: float = 0.0
    """Seconds since the latest request."""
    progress: str = ""
    """Progress of the load, as text."""
    reason: str = ""
    """Why the latest load failed."""
    shown: tuple[str, ...] = ()
    """The names that lists of models have; empty: `name`."""
    adapters: tuple[str, ...] = ()
    """Names of the adapters in its settings."""


class Offer(msgspec.Struct, frozen=True, tag=True):
    """The only message of a worker of several models, whose models are workers themselves."""

    name: str
    """The worker's, for people."""
    created: int
    room: int
    """Free bytes for models."""
    models: tuple[OfferedModel, ...]


class LoadModel(msgspec.Struct, frozen=True):
    model: str
    """`OfferedModel.name`."""


class HeldPrompt(msgspec.Struct, frozen=True, array_like=True):
    """A prompt that a worker has cached."""

    digest: bytes
    """The digest of the last segment, by the gateway that sent the request."""
    images: tuple[bytes, ...]
    added: int
    """Tokens that were not cached before."""


class Beat(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    load: Load
    prompts: tuple[HeldPrompt, ...] = ()
    """Other gateways' requests that were answered since the last beat."""


class Begun(msgspec.Struct, frozen=True, tag=True):
    """A request's first item was sent."""

    route: int
    """The gateway's number of the request."""
    feedback: Feedback


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A request's last item was sent."""

    route: int
    feedback: Feedback


FeedMessage = Hello | Offer | Beat | Begun | Ended
