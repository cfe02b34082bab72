"""The interface of servers and gateways for common middleware."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from vlmserve.errors import VLMServeError
from vlmserve.server.accounts import KeyRing
from vlmserve.settings.config import ServerConfig

if TYPE_CHECKING:
    from vlmserve.server.tracing import Tracing


class ErrorCounter(Protocol):
    def count_error(self, code: str) -> None: ...


class Front(Protocol):
    config: ServerConfig
    keys: KeyRing | None
    """None: requests need no key."""
    tracing: Tracing | None
    max_body_bytes: int

    @property
    def metrics(self) -> ErrorCounter: ...

    @property
    def max_logprobs(self) -> int | None:
        """Maximum logprobs of a request; None while no engine is known."""

    @property
    def phase(self) -> str: ...

    def problem(self) -> VLMServeError | None:
        """The reason that no request can be answered."""
