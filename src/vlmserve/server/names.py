"""Names of the model and its adapters in requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from vlmserve.errors import UnknownModelError
from vlmserve.models.names import repository_of
from vlmserve.server.adapters import Adapters
from vlmserve.settings.config import EngineConfig, ServerConfig
from vlmserve.types import AdapterInfo

if TYPE_CHECKING:
    from vlmserve.frontend.client import EngineClient

_MOST_SHOWN = 5
"""Maximum adapters that an error lists."""


class ServedNames:
    def __init__(
        self,
        engine: EngineConfig,
        server: ServerConfig,
        adapters: Adapters,
        client: Callable[[], EngineClient | None],
    ) -> None:
        is_path = engine.model.startswith(("/", "./", "../", "~"))
        own_name = (engine.model.rstrip("/").rsplit("/", 1)[-1] if is_path else "") or engine.model
        self.own = tuple(dict.fromkeys(server.served_model_name)) or (own_name,)
        """Names of the model itself; answers have the first one."""
        self._aliases = {*self.own, engine.model, repository_of(engine.model) or engine.model}
        self._adapters, self._client = adapters, client

    @property
    def all(self) -> tuple[str, ...]:
        adapters = (name for name, _ in self.adapter_infos())
        return tuple(dict.fromkeys((*self.own, *sorted(self._aliases), *adapters)))

    def check(self, name: str | None) -> None:
        if name is not None and name not in self._aliases and not self._adapters.knows(self._client(), name):
            adapters = [adapter for adapter, _ in itertools.islice(self.adapter_infos(), _MOST_SHOWN)]
            known = ", ".join(map(repr, [*self.own, *adapters]))
            raise UnknownModelError(f"There is no model {name!r:.100} here, only {known}", param="model")

    def is_own(self, name: str | None) -> bool:
        """True for the model itself, False for an adapter."""
        return name is None or name in self._aliases

    def adapter_infos(self) -> Iterator[tuple[str, AdapterInfo | None]]:
        return self._adapters.infos(self._client())

    async def adapter(self, client: EngineClient, name: str | None) -> str:
        """Have the engine serve the adapter that a request names; "" for the model itself.

        Raises UnknownModelError or AdapterError.
        """
        if name is None or name in self._aliases:
            return ""
        await self._adapters.resolve(client, name)
        return name
