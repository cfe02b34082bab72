"""What gateways and workers tell each other."""

from __future__ import annotations

from typing import Any

import msgspec

from vlmserve.scaleout.changes import Change
from vlmserve.server.schema.cards import Abilities


class WorkerInfo(msgspec.Struct, frozen=True):
    """A worker as the cluster knows it.

    id: unique, and another one after each start of the process. name: for people, kept over restarts. url: of its own
    HTTP server. models: names under which requests reach it. epoch: changes whenever the engine's caches begin empty.
    capacity: requests that run at once. cache_tokens: of the KV cache. draining: takes no new requests.
    """

    id: str
    name: str
    url: str
    models: tuple[str, ...]
    epoch: str = ""
    capacity: int = 256
    cache_tokens: int = 1 << 20
    draining: bool = False


class Load(msgspec.Struct, frozen=True):
    """How busy a worker is.

    queued_seconds: of prefill, images included, for which requests wait that it has accepted. token_seconds,
    image_seconds: what a token of a prompt and an image that is not cached cost it; None: not measured yet.
    """

    epoch: str = ""
    running: int = 0
    queued_seconds: float = 0.0
    token_seconds: float | None = None
    image_seconds: float | None = None


class Feedback(msgspec.Struct, frozen=True):
    """What a worker says with the first and the last item of an answer.

    cached_tokens: of the prompt's. response_id: of an answer that later requests may continue.
    """

    load: Load
    prompt_tokens: int = 0
    cached_tokens: int = 0
    images: int = 0
    images_encoded: int = 0
    completion_tokens: int = 0
    response_id: str | None = None


FEED_PATH = "/cluster/feed"
"""Where a gateway listens to a worker: an answer that never ends, with a message on each line."""
LOAD_PATH = "/cluster/load"
"""How busy a worker is, for whoever decides how many there should be. `queued_seconds` is the average since this was
asked last."""
LOST_PATH = "/cluster/lost"
"""Where a worker is told of a response that another one has begun and cannot end."""
ADAPTERS_PATH = "/cluster/adapters"
"""Where a worker is told to load or unload an adapter."""
TOKEN_HEADER = "x-vlmserve-cluster"
"""What the members of a cluster know each other by."""
ROUTE_HEADER = "x-vlmserve-route"
"""The gateway's id and its number of a request, with a dot between."""
PROMPT_HEADER = "x-vlmserve-prompt"
"""What a gateway calls a request's prompt: digests in hexadecimal, with commas between, of its last segment and of its
images."""
OWNER_HEADER, TENANT_HEADER, SEED_HEADER = "x-vlmserve-owner", "x-vlmserve-tenant", "x-vlmserve-seed"
CLIENT_HEADER = "x-vlmserve-client"
"""The address of a gateway's client."""


class LostResponse(msgspec.Struct, frozen=True):
    """request: the body, as the client sent it. response: of its first event, with status and error as they are now."""

    request: msgspec.Raw
    response: dict[str, Any]


class AdapterFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of an adapter that a worker serves, for lists of models. root: the digest of its content, once it is loaded.
    mixes: the adapters that X-LoRA mixes now."""

    root: str | None = None
    mixes: tuple[str, ...] = ()


class ModelFacts(msgspec.Struct, frozen=True):
    """Of a worker's model, for lists of models. names: the first is the model's own. adapters: those it serves.
    changes: of adapters, that it has made while the cluster runs."""

    names: tuple[str, ...]
    created: int
    abilities: Abilities | None
    """None while the model loads."""
    adapters: dict[str, AdapterFacts] = {}
    changes: tuple[Change, ...] = ()


class MakeChange(msgspec.Struct, frozen=True):
    """Load or unload an adapter. force: whatever is served under its name now; else that may be a reason to refuse."""

    change: Change
    force: bool


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message of a feed, and another one whenever something of it changes."""

    info: WorkerInfo
    facts: ModelFacts


class HeldPrompt(msgspec.Struct, frozen=True, array_like=True):
    """A prompt that a worker has cached. digest, images: as the gateway calls them that sent the request. added: tokens
    of it that were not cached there before."""

    digest: bytes
    images: tuple[bytes, ...]
    added: int


class Beat(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """That the worker is alive, and how busy it is. prompts: of requests of other gateways whose answers have begun
    since the last one."""

    load: Load
    prompts: tuple[HeldPrompt, ...] = ()


class Begun(msgspec.Struct, frozen=True, tag=True):
    """The first item of a request's answer was sent. route: the gateway's number of the request."""

    route: int
    feedback: Feedback


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The last item of a request's answer was sent."""

    route: int
    feedback: Feedback


FeedMessage = Hello | Beat | Begun | Ended
