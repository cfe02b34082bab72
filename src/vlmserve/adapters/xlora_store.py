"""Serve X-LoRA checkpoints among other adapters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from vlmserve.adapters.location import is_xlora
from vlmserve.adapters.lora import Adapter
from vlmserve.adapters.store import AdapterStore, Served
from vlmserve.adapters.xlora import read_xlora
from vlmserve.models.adaptable import AdaptableModel


class XLoraStore(AdapterStore):
    def __init__(self, model: AdaptableModel, *, max_rank: int, max_loaded: int = 64, max_bytes: int = 2**31) -> None:
        super().__init__(model, max_rank=max_rank, max_loaded=max_loaded, max_bytes=max_bytes)
        self._scaling_passes: dict[bytes, bytes] = {}

    def scaling_pass(self, served: Served) -> bytes | None:
        """The cache key of KV blocks in the scaling pass, used instead of the adapter's digest.

        Empty: the base model runs this pass. None: there is none.
        """
        return self._scaling_passes.get(served.digest)

    def serve(self, name: str, folder: Path, adapter: Adapter) -> Served:
        served = super().serve(name, folder, adapter)
        if adapter.mixture is not None:
            of_base = adapter.mixture.of_scaling_pass is None
            self._scaling_passes[adapter.digest] = b"" if of_base else adapter.digest + b" scaling pass"
        self._forget()
        return served

    def unload(self, name: str) -> None:
        super().unload(name)
        self._forget()

    def _forget(self) -> None:
        served = {self[name].digest for name in self.names}
        self._scaling_passes = {digest: known for digest, known in self._scaling_passes.items() if digest in served}

    def _read(self, folder: Path, pool: Mapping[str, str]) -> Adapter:
        if not is_xlora(folder):
            return super()._read(folder, pool)
        with torch.inference_mode():
            return read_xlora(folder, self.model, max_rank=self._max_rank, pool=pool)
