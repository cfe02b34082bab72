"""The adapters that are served: by name, and in memory by digest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vlmserve.adapters.checkpoint import AdapterCheckpoint
from vlmserve.adapters.lora import Adapter, read_adapter
from vlmserve.errors import UnknownModelError
from vlmserve.models.adaptable import AdaptableModel


@dataclass(frozen=True)
class Served:
    """An adapter under a name. folder: where its files are."""

    name: str
    folder: Path
    adapter: Adapter


class AdapterStore:
    """Adapters by name. A name may get other content; requests keep the adapter that it had when they came."""

    def __init__(self, model: AdaptableModel, *, max_rank: int) -> None:
        self.model, self._max_rank = model, max_rank
        self._served: dict[str, Served] = {}
        self._memory: dict[bytes, Adapter] = {}

    def load(self, name: str, folder: Path) -> Served:
        """Serve an adapter under a name, in place of what was served so. Raises AdapterError, and changes nothing
        then."""
        adapter = read_adapter(AdapterCheckpoint(folder), self.model, max_rank=self._max_rank)
        self._memory[adapter.digest] = adapter
        self._served[name] = served = Served(name, folder, adapter)
        return served

    def unload(self, name: str) -> None:
        """Serve an adapter no more. Raises UnknownModelError for a name that is not served."""
        del self._served[self[name].name]

    @property
    def names(self) -> list[str]:
        """Of the adapters that are served."""
        return sorted(self._served)

    def __getitem__(self, name: str) -> Served:
        """Raises UnknownModelError for a name that is not served."""
        if name not in self._served:
            raise UnknownModelError(f"there is no adapter {name!r} here", param="model")
        return self._served[name]

    def is_loaded(self, digest: bytes) -> bool:
        """Whether an adapter is in memory."""
        return digest in self._memory

    def get(self, digest: bytes) -> Adapter:
        """An adapter in memory."""
        return self._memory[digest]
