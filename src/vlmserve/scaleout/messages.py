"""What gateways and workers tell each other."""

from __future__ import annotations

import msgspec


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
    image_seconds: what a token of a prompt and an image that is not cached cost it.
    """

    epoch: str = ""
    running: int = 0
    queued_seconds: float = 0.0
    token_seconds: float = 1e-4
    image_seconds: float = 0.02


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
