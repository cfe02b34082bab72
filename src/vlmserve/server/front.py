"""What the middleware in front of all routes needs, of a server and of a gateway alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from vlmserve.config import ServerConfig
from vlmserve.errors import VLMServeError
from vlmserve.server.accounts import KeyRing

if TYPE_CHECKING:
    from vlmserve.server.tracing import Tracing


class ErrorCounter(Protocol):
    """Counts requests that were answered with an error."""

    def count_error(self, code: str) -> None: ...


class Front(Protocol):
    """keys: who may ask; None: everybody. phase: "leaving" while clients are to close
    their connections, "closing" while requests are refused as well. tracing: None if it is off."""

    config: ServerConfig
    keys: KeyRing | None
    tracing: Tracing | None
    max_body_bytes: int

    @property
    def metrics(self) -> ErrorCounter: ...

    @property
    def max_logprobs(self) -> int | None:
        """The most logprobs that a request may ask for; None while no engine is known."""

    @property
    def phase(self) -> str: ...

    def problem(self) -> VLMServeError | None:
        """Why no request can be answered now."""
